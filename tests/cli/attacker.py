"""Attacks a running `turboquant web`: attacker.py MODEL SECRET. Prints one JSON object with
what it saw. Run by test_web.py with the python of an environment that has gradio."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import quote

PROGRAM = "import sys; from turboquant_nb.cli import main; sys.exit(main())"


class Server:
    "The command, told to run one answer at once and to end each after a second."

    def __init__(self, model):
        words = f"web --model {model} --port 0 --runs 1 --sessions 2 --seconds 1".split()
        how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], **how)
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rstrip("/").rpartition(":")[2])

    def ask(self, method, path, body=None, headers=None, limit=20000):
        "(status, text) of a request."
        to = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            to.request(method, path, body, headers or {})
            answer = to.getresponse()
            return answer.status, answer.read(limit).decode("utf-8", "replace")
        except OSError as error:  # the server hung up while we were sending
            return 0, type(error).__name__
        finally:
            to.close()

    def call(self, name, *data):
        "What the page's own function says: all events of one call."
        head = {"Content-Type": "application/json"}
        status, text = self.ask(
            "POST", f"/gradio_api/call/{name}", json.dumps({"data": data}), head
        )
        if status != 200:
            return f"{status} {text}"
        event = json.loads(text)["event_id"]
        return self.ask("GET", f"/gradio_api/call/{name}/{event}", limit=10**6)[1]

    def end(self):
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def reachable(port):
    "Whether another address of this machine answers."
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect(("192.0.2.1", 9))  # sends nothing
            address = s.getsockname()[0]
        with socket.create_connection((address, port), timeout=2):
            return not address.startswith("127.")
    except OSError:
        return False


def attack(model, secret):
    server, saw = Server(model), {}
    answer = lambda *data: server.call("answer", *data)
    try:
        saw["reachable"] = reachable(server.port)
        saw["files"] = [
            server.ask("GET", path)
            for name in (secret, "/etc/passwd", "../../../../etc/passwd")
            for path in (
                f"/gradio_api/file={name}",
                f"/file={quote(name, safe='')}",
                f"/gradio_api/file/{name}",
                f"/static/{name}",
            )
        ]
        form = (
            "--x\r\nContent-Disposition: form-data; name=files; filename=a\r\n\r\nhi\r\n--x--"
        )
        head = {"Content-Type": "multipart/form-data; boundary=x"}
        saw["upload"] = [
            server.ask("POST", path, form, head)[0]
            for path in ("/gradio_api/upload", "/upload", "/gradio_api/upload/")
        ]
        large = b'{"data": ["' + b"a" * 10**7 + b'"]}'
        parts = (large[i : i + 10**5] for i in range(0, len(large), 10**5))
        chunked = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        path = "/gradio_api/call/answer"
        saw["large"] = [
            server.ask("POST", path, large)[0],
            server.ask("POST", path, parts, chunked)[0],
        ]
        saw["recipes"] = [
            answer("Hello", recipe, 4, None, None, None)
            for recipe in (secret, f"[{secret}]", '{"key": {}}', ["k3v3"], {"path": secret})
        ]
        saw["fields"] = [
            answer("Hello", "k3v3", *fields)
            for fields in (
                (10**9, None, None, None),
                (secret, None, None, None),
                (4, secret, None, None),
                (4, None, 10**14, None),
                (4, None, None, {"path": secret}),
            )
        ]
        saw["text"] = answer({"path": secret}, "k3v3", 4, None, None, None)
        saw["drawing"] = [
            server.call("draw", side, layer, head)
            for side, layer, head in (
                ("__class__", 0, 0),
                ("key", 10**9, 0),
                ("key", 0, secret),
            )
        ]
        began = time.monotonic()
        saw["long"] = answer("Hello", "k3v3", 1024, None, None, None)[-2000:]
        saw["seconds"] = time.monotonic() - began
        told = []
        crowd = [
            threading.Thread(
                target=lambda: told.append(answer("Hi", "k2v2", 2, None, None, None))
            )
            for _ in range(40)
        ]
        for x in crowd:
            x.start()
        for x in crowd:
            x.join()
        saw["crowd"] = [sum("complete" in x for x in told), len(told)]
        saw["after"] = server.ask("GET", "/")[0]
        saw["alive"] = server.process.poll() is None
    finally:
        saw["code"], saw["stderr"] = server.end()
    return saw


if __name__ == "__main__":
    print(json.dumps(attack(*sys.argv[1:])))
