"""Results as the commands write them (docs/results.md), made up: enough like a drive to look at."""

import itertools
import random
import statistics

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def head(command, **members):
    """What all results have in front."""
    return {
        "format": "tensorferry-results",
        "version": 1,
        "command": command,
        "arguments": [command, "--json", "results.json"],
        "tensorferry": "0.1.0",
        "started": "2026-11-15T10:52:00Z",
        "complete": True,
        "machine": {
            "host": "ferry-01",
            "kernel": "Linux 6.1.0-32-amd64",
            "architecture": "x86_64",
            "processor": "AMD EPYC 9354 32-Core Processor",
            "processors": 64,
            "memory_bytes": 270038564864,
        },
        "places": [place("/mnt/nvme")],
        "settings": {},
    } | members


def place(directory, name="nvme0n1", model="Samsung SSD 990 PRO 2TB"):
    return {
        "directory": directory,
        "drive": {
            "name": name,
            "model": model,
            "disks": 1,
            "logical_block_bytes": 512,
            "request_bytes_max": 128 * KiB,
            "block_bytes": 256 * KiB,
            "queue_depth": 64,
            "scheduler": "[none] mq-deadline",
            "rotational": "0",
            "nr_requests": "1023",
            "write_cache": "write back",
        },
        "file_system": {
            "kind": "ext4",
            "mount_point": directory,
            "mount_options": "rw,noatime",
            "bytes": 1967317549056,
            "free_bytes": 1402317549056,
        },
    }


def summary(values):
    """As src/bench/measure/statistics.cc, but for the interval, which is that of many samples."""
    ordered = sorted(values)
    count = len(ordered)

    def percentile(share):
        at = share * (count - 1)
        low = int(at)
        high = min(low + 1, count - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if count > 1 else 0.0
    half = 1.972 * deviation / count**0.5
    found = {
        "mean": mean,
        "median": percentile(0.5),
        "standard_deviation": deviation,
        "ci95": [mean - half, mean + half],
        "p50": percentile(0.5),
        "p90": percentile(0.9),
        "p99": percentile(0.99),
    }
    if count >= 1000:
        found["p999"] = percentile(0.999)
    return found


def series(direction, size, samples, chance, speed=1.0):
    """Latencies with a body, a tail and, for writes, a cache that fills."""
    peak = (6.9e9 if direction == "read" else 5.1e9) * speed
    seconds, started, now = [], [], 0.0
    for at in range(samples):
        latency = 90e-6 + size / peak
        if direction == "write" and at > 0.7 * samples:
            latency *= 1.6
        latency *= chance.lognormvariate(0, 0.05)
        if chance.random() < 0.02:
            latency *= chance.uniform(1.5, 4)
        seconds.append(latency)
        started.append(now)
        now += latency * 1.02
    one = {
        "direction": direction,
        "bytes": size,
        "engine": "io_uring",
        "engine_reason": "io_uring works here: registered buffers and files, kernel 6.1",
        "direct": True,
        "seconds": seconds,
        "started_seconds": started,
        "latency_seconds": summary(seconds),
        "bandwidth_mb_per_second": summary([size / 1e6 / value for value in seconds]),
        "cpu_seconds_per_gb": 0.081,
    }
    if direction == "read":
        one["cold"] = {
            "bytes": size * samples,
            "device_bytes": size * samples + 4096,
            "resident_pages": 0,
            "cold": True,
            "proof": "direct I/O, and the drive counted as many bytes as were asked for",
        }
    return one


def bench(samples=200, sizes=(2 * MiB, 8 * MiB, 32 * MiB), seed=1, speed=1.0, **members):
    chance = random.Random(seed)
    settings = {
        "directory": "/mnt/nvme",
        "sizes": list(sizes),
        "iterations": samples,
        "workers": 16,
        "queue_depth": 64,
        "block_bytes": 2 * MiB,
        "engine": "auto",
        "memory": "pinned",
        "seed": 1,
    }
    measured = [
        series(direction, size, samples, chance, speed)
        for direction in ("write", "read")
        for size in sizes
    ]
    return head("bench", settings=settings, series=measured) | members


def point(direction, overlap, engine, directory, numbers, chance, loops, speed=1.0):
    block, depth, workers = numbers
    in_flight = block * depth * (workers if overlap == "overlap" else workers**0.5)
    peak = (6.9 if direction == "read" else 5.1) * speed
    if overlap == "sequential":
        peak *= 0.82
    if engine == "threads":
        peak *= 0.7
    rate = peak * in_flight / (in_flight + 3 * MiB) * (1 - 0.01 * (workers - 1))
    seconds = [0.4 * GiB / 1e9 / (rate * chance.lognormvariate(0, 0.02)) for _ in range(loops)]
    rate = 0.4 * GiB / 1e9 / statistics.fmean(seconds)
    name = f"{direction}_block_{overlap}_t1_p{workers}_d{depth}_bs{block // KiB}K.txt"
    return {
        "directory": directory,
        "engine": engine,
        "direction": direction,
        "block_bytes": block,
        "queue_depth": depth,
        "workers": workers,
        "overlap": overlap,
        "submit": "block",
        "status": "ok",
        "seconds": seconds,
        "gb_per_second": rate,
        "gib_per_second": rate * 1e9 / GiB,
        "command": f"tensorferry point --{direction}_file x --queue_depth {depth}",
        "log": f"aio_perf_sweep/{direction}/{name}",
    }


def fail(one, error="write /mnt/nvme/x at 0: No space left on device: free some room"):
    """A point as it is when it did not work."""
    for name in ("seconds", "gb_per_second", "gib_per_second"):
        del one[name]
    one |= {"status": "failed", "error": error}


def sweep(
    engines=("io_uring",),
    directories=("/mnt/nvme",),
    workers=(1, 2, 8),
    loops=3,
    seed=2,
    speed=1.0,
    **members,
):
    chance = random.Random(seed)
    blocks, depths = (128 * KiB, 256 * KiB, 512 * KiB, MiB), (4, 16, 32, 64)
    points = [
        point(direction, overlap, engine, directory, numbers, chance, loops, speed)
        for directory in directories
        for engine in engines
        for direction in ("read", "write")
        for overlap in ("overlap", "sequential")
        for numbers in itertools.product(blocks, depths, workers)
    ]
    for one in points:
        if (one["direction"], one["block_bytes"], one["queue_depth"]) == ("write", MiB, 64):
            fail(one)
    settings = {
        "directories": list(directories),
        "engines": list(engines),
        "io_bytes": 400 * MiB,
        "loops": loops,
        "drop_caches": True,
        "space": {
            "block_size": ["128K", "256K", "512K", "1M"],
            "queue_depth": list(depths),
            "overlap_events": [True, False],
            "io_parallel": list(workers),
            "single_submit": [False],
        },
    }
    return (
        head(
            "sweep",
            settings=settings,
            points=points,
            places=[place(directory) for directory in directories],
        )
        | members
    )


def tune(objective="read", seed=3, speed=1.0, **members):
    chance = random.Random(seed)
    space = list(
        itertools.product(
            ("io_uring", "libaio"), (256 * KiB, 512 * KiB, MiB, 2 * MiB), (8, 32, 64), (1, 4)
        )
    )
    default = ("io_uring", 512 * KiB, 32, 1)

    def rate(setting):
        engine, block, depth, workers = setting
        in_flight = block * depth * workers
        return speed * (6.9 if engine == "io_uring" else 6.6) * in_flight / (in_flight + 4 * MiB)

    def candidate(setting, spread, middle):
        scores = [rate(setting) / middle * chance.lognormvariate(0, spread) for _ in range(5)]
        score, half = statistics.fmean(scores), 1.24 * statistics.stdev(scores)
        named = dict(zip(("engine", "block_bytes", "queue_depth", "workers"), setting))
        measured = {"gb_per_second": score * middle}
        if objective == "latency":
            measured = {"latency_seconds": 1e-4 / score}
        return (
            named
            | {"scores": scores, "score": score, "low": score - half, "high": score + half}
            | measured
            | {"kept": False}
        )

    rounds, alive, transfer = [], space, 8 * MiB
    while len(alive) > 2:
        middle = statistics.median(map(rate, alive))
        spread = 0.06 * (8 * MiB / transfer) ** 0.5
        tried = [candidate(setting, spread, middle) for setting in alive]
        ranked = sorted(tried, key=lambda one: -one["score"])
        for one in ranked[: max(2, len(ranked) // 3)]:
            one["kept"] = True
        rounds.append({"transfer_bytes": transfer, "seconds": 6.2, "candidates": tried})
        alive = [setting for setting, one in zip(alive, tried) if one["kept"]]
        transfer *= 4
    names = (
        "engine",
        "block_bytes",
        "queue_depth",
        "workers",
        "score",
        "gb_per_second",
        "latency_seconds",
    )
    best = max(rounds[-1]["candidates"], key=lambda one: one["score"])
    plain = next(
        one
        for one in rounds[0]["candidates"]
        if (one["engine"], one["block_bytes"], one["queue_depth"], one["workers"]) == default
    )
    settings = {"directory": "/mnt/nvme", "objective": objective, "seconds_max": 30}
    return (
        head(
            "tune",
            settings=settings,
            rounds=rounds,
            seconds=24.3,
            best={name: best[name] for name in names if name in best},
            default={name: plain[name] for name in names if name in plain},
            profile="~/.config/tensorferry/profiles/nvme0n1.json",
        )
        | members
    )


def choice(name, seconds):
    stages = [
        {
            way: [(i + at) * seconds / 10, (i + at + 1) * seconds / 10]
            for at, way in enumerate(("read", "compute", "write"))
        }
        for i in range(8)
    ]
    places = [
        {"what": "weights", "gpu_bytes": 14 * GiB, "memory_bytes": 0, "drive_bytes": 0},
        {"what": "moments", "gpu_bytes": 0, "memory_bytes": 8 * GiB, "drive_bytes": 48 * GiB},
    ]
    return {
        "name": name,
        "settings": {"buffer_bytes": 64 * MiB, "buffer_count": 4, "moments": "fp32"},
        "places": places,
        "gpu_bytes": 14 * GiB,
        "memory_bytes": 8 * GiB,
        "drive_bytes": 48 * GiB,
        "step_read_bytes": 48 * GiB,
        "step_written_bytes": 48 * GiB,
        "pass_read_bytes": 0,
        "pass_written_bytes": 0,
        "step_seconds": seconds,
        "pass_seconds": 2.0,
        "compute_seconds": 2.0,
        "stepping_seconds": 0.2,
        "drive_seconds": seconds,
        "copy_seconds": 0,
        "network_seconds": 0,
        "limit": "drive",
        "tokens_per_second": 16384 / (seconds + 2),
        "written_bytes_per_day": 1e14,
        "drive_days": 70.0,
        "sub_groups": 900,
        "shortages": [],
        "step": stages,
        "pass": [],
    }


def plan(**members):
    task = {
        "architecture": "llama",
        "parameters": 7_000_000_000,
        "active_parameters": 7_000_000_000,
        "dtype": "bf16",
        "optimizer": "adamw",
        "tokens_per_step": 16384,
    }
    return head(
        "plan",
        places=[],
        settings={"task": task, "machine": {"ranks": 1, "drives": 1}, "costs": {}},
        choices=[choice("fastest", 10.0), choice("balance", 11.0), choice("least memory", 20.0)],
        changes=[{"what": "one more drive in each node", "fits": True, "seconds": 7.0}],
        by_drives=[
            {"drives": n, "fits": True, "seconds": 2 + 10 / n, "drive_days": 70.0 * n}
            for n in (1, 2, 4, 8)
        ],
        **members,
    )
