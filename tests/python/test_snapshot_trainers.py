"""Snapshots every few steps of transformers' Trainer, of Lightning and of a plain loop, and runs
that go on after a kill: the bits of a run that nobody killed."""

import json

import pytest

torch = pytest.importorskip("torch")

from programs import check_python
from warm_python import WARM_PYTHON

# Each program has train(folder, dies), which returns the bits of all weights. It is forked:
# its imports take longer than what it does.
RUNNER = """
import json, os, signal, sys, torch
torch.set_num_threads(1)  # OpenMP does not survive a fork
import tensorferry.offload, tensorferry.optim, tensorferry.snapshot
STEPS, EVERY = 11, 3

def die_at(step, dies):
    if step == dies:
        os.kill(os.getpid(), signal.SIGKILL)

def bits(model):
    return sum(value.double().abs().sum().item() for value in model.state_dict().values())

def optimizer_of(model, folder):
    os.makedirs(folder, exist_ok=True)
    return tensorferry.optim.AdamW(
        model.parameters(), lr=1e-2, nvme_path=folder, buffer_bytes=1 << 20
    )

def run(folder, dies):
    inner, outer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(outer, json.dumps(train(folder, dies)).encode())
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    os.close(outer)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = os.read(inner, 1 << 16)
    assert status == (-signal.SIGKILL if dies else 0), status
    return json.loads(told) if told else None

folder = sys.argv[1]
expected = run(folder + "/whole", 0)
assert run(folder + "/cut", 8) is None  # the snapshots of steps 3 and 6 are there
found = [one.name for one in tensorferry.snapshot.find(folder + "/cut/snapshots")]
assert found == ["snapshot-00000001", "snapshot-00000002"], found
again = run(folder + "/cut", 0)
assert again["first"] == 7 and again["weights"] == expected["weights"], (again, expected)
assert again["losses"] == expected["losses"][6:], (again, expected)
"""

PLAIN = """
def train(folder, dies):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 8)
    )
    optimizer = optimizer_of(model, folder)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    held = dict(model=model, optimizer=optimizer, scheduler=scheduler)
    resumed = tensorferry.snapshot.resume(folder + "/snapshots", **held)
    begin = resumed.extra["step"] if resumed else 0
    losses = []
    for step in range(begin + 1, STEPS + 1):
        die_at(step, dies)
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step % EVERY == 0:
            extra = {"step": step}
            tensorferry.snapshot.take(folder + "/snapshots", **held, extra=extra, keep=2)
    return {"first": begin + 1, "weights": bits(model), "losses": losses}
"""

TRAINER = """
import warnings
warnings.simplefilter("ignore")
import transformers
from tensorferry.transformers import SnapshotCallback
transformers.logging.set_verbosity(transformers.logging.CRITICAL)

class Watch(transformers.TrainerCallback):
    def __init__(self, dies):
        self.dies, self.first, self.losses = dies, None, []
    def on_step_begin(self, args, state, control, **given):
        self.first = self.first or state.global_step + 1
        die_at(state.global_step + 1, self.dies)
    def on_log(self, args, state, control, logs, **given):
        if "loss" in logs:
            self.losses.append(logs["loss"])

def train(folder, dies, accumulate=ACCUMULATE):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = optimizer_of(model, folder)
    arguments = transformers.TrainingArguments(
        output_dir=folder + "/trainer", use_cpu=True, max_steps=STEPS, logging_steps=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=accumulate, save_strategy="no",
        report_to=[], disable_tqdm=True, seed=3,
    )
    rows = torch.randint(0, 64, (10 * accumulate, 12), generator=torch.Generator().manual_seed(5))
    watch = Watch(dies)
    snapshots = SnapshotCallback(folder + "/snapshots", every=EVERY, keep=2)
    trainer = transformers.Trainer(
        model, arguments, optimizers=(optimizer, None), callbacks=[watch, snapshots],
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train(resume_from_checkpoint=snapshots.checkpoint())
    return {"first": watch.first, "weights": bits(model), "losses": watch.losses}
"""

LIGHTNING = """
import logging, torch, warnings
warnings.simplefilter("ignore")
import pytorch_lightning as lightning
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

class Rows(torch.utils.data.IterableDataset):
    begin = 0  # the callback sets it before the first row is asked for
    def __len__(self):  # else Lightning asks for the first row before it calls the callback
        return STEPS
    def __iter__(self):
        for number in range(self.begin, STEPS):
            yield torch.randn(4, 16, generator=torch.Generator().manual_seed(number))

class Module(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.folder, self.losses = folder, []
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 8)
        )
    def training_step(self, rows, _):
        loss = self.layers(rows).square().mean()
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        optimizer = optimizer_of(self, self.folder)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]

class Snapshots(lightning.Callback):
    def __init__(self, path, every, rows):
        self.path, self.every, self.rows = path, every, rows
        self.step = 0
    def held(self, trainer, module):
        [scheduler] = trainer.lr_scheduler_configs
        return dict(model=module, optimizer=trainer.optimizers[0], scheduler=scheduler.scheduler)
    def on_train_start(self, trainer, module):
        resumed = tensorferry.snapshot.resume(self.path, **self.held(trainer, module))
        if resumed is not None:
            self.step = self.rows.begin = resumed.extra["step"]
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        self.step += 1
        if self.step % self.every == 0:
            extra = {"step": self.step}
            held = self.held(trainer, module)
            tensorferry.snapshot.take(self.path, **held, extra=extra, keep=2)

class Watch(lightning.Callback):
    first = None
    def on_train_batch_start(self, trainer, module, batch, number):
        self.first = self.first or snapshots.step + 1
        die_at(snapshots.step + 1, dies)

def train(folder, when):
    global snapshots, dies
    dies = when
    torch.manual_seed(1)
    rows = Rows()
    module, watch = Module(folder), Watch()
    snapshots = Snapshots(folder + "/snapshots", EVERY, rows)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[snapshots, watch],
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))
    return {"first": watch.first, "weights": bits(module), "losses": module.losses}
"""


def run(program, tmp_path):
    check_python(program + RUNNER, tmp_path, python=WARM_PYTHON)


def test_a_plain_loop_goes_on_after_a_kill(tmp_path):
    run(PLAIN, tmp_path)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_of_transformers_goes_on_after_a_kill(tmp_path, accumulate):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run(TRAINER.replace("ACCUMULATE", json.dumps(accumulate)), tmp_path)


def test_lightning_goes_on_after_a_kill(tmp_path):
    pytest.importorskip("pytorch_lightning")
    run(LIGHTNING, tmp_path)
