"""A browser that opens pages one after the other: it takes longer to start than to draw a page.

It is spoken to in the DevTools protocol, over a pipe.
"""

import fcntl
import json
import os
import select
import subprocess
import time

SECONDS_MAX = 120
# What a page has to complain of.
COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    def __init__(self, program, profile):
        commands, self.to_it = os.pipe()
        self.from_it, answers = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        self.process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(ends[0], 3), os.dup2(ends[1], 4)),
        )
        for end in (commands, answers, *ends):
            os.close(end)
        self.received, self.events, self.number = b"", [], 0

    def close(self):
        self.call("Browser.close")
        self.process.wait(SECONDS_MAX)
        os.close(self.to_it)
        os.close(self.from_it)

    def receive(self):
        """The next message."""
        limit = time.monotonic() + SECONDS_MAX
        while b"\0" not in self.received:
            ready, _, _ = select.select([self.from_it], [], [], limit - time.monotonic())
            data = os.read(self.from_it, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self.received += data
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def call(self, method, session=None, **parameters):
        """Returns the answer; what happens meanwhile is added to the events."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to_it, data) :]
        while (answer := self.receive()).get("id") != self.number:
            self.events.append(answer)
        assert "result" in answer, answer
        return answer["result"]

    def wait_for(self, method):
        while not any(event["method"] == method for event in self.events):
            self.events.append(self.receive())

    def open(self, address, *settings):
        """Returns the document after its scripts ran, and what was in the console. Settings are
        calls that come first: (method, parameters)."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        for method, parameters in [("Page.enable", {}), *settings]:
            self.call(method, session, **parameters)
        for domain in ("Runtime", "Log"):
            self.call(f"{domain}.enable", session)
        # Ten seconds of the page's time, as fast as it can.
        policy = dict(policy="pauseIfNetworkFetchesPending", budget=10_000)
        self.call("Page.navigate", session, url=address)
        self.call("Emulation.setVirtualTimePolicy", session, **policy)
        self.wait_for("Emulation.virtualTimeBudgetExpired")
        self.wait_for("Page.loadEventFired")
        document = self.call(
            "Runtime.evaluate", session, expression="document.documentElement.outerHTML"
        )["result"]["value"]
        said = [event for event in self.events if event["method"] in COMPLAINTS]
        self.call("Target.closeTarget", targetId=target)
        return document, said
