"""Looks at `turboquant web` with real browsers: browser.py MODEL. Prints one JSON object with
what it saw. Run by test_web.py with the python of an environment that has gradio and selenium;
Chromium and its driver are taken from the PATH."""

import json
import shutil
import signal
import subprocess
import sys
import time

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

SECONDS = 120


def browser():
    options = webdriver.ChromeOptions()
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,1600",
    ):
        options.add_argument(word)
    options.binary_location = shutil.which("chromium")
    return webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )


def wait(what, until):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if found := until():
                return found
        except StaleElementReferenceException:
            pass
        time.sleep(0.1)
    raise SystemExit(f"browser.py: {what} did not come in {SECONDS} s")


class Page:
    "One person's window."

    def __init__(self, url):
        self.driver = browser()
        self.driver.get(url)
        wait("the form", lambda: self.driver.find_elements(By.CSS_SELECTOR, "#prompt textarea"))

    def field(self, css):
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def write(self, css, text):
        field = self.field(css)
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE)
        field.send_keys(text)

    def ask(self, prompt, tokens):
        self.write("#most input", str(tokens))
        self.write("#prompt textarea", prompt)
        self.field("#ask").click()

    def done(self):
        wait("an answer", lambda: "Done" in self.field("#progress").text)
        wait("a picture", lambda: self.driver.find_elements(By.CSS_SELECTOR, "#stored img"))
        return self.seen()

    def seen(self):
        picture = self.driver.find_elements(By.CSS_SELECTOR, "#stored img")
        return {
            "plain": self.field("#plain textarea").get_attribute("value"),
            "coded": self.field("#coded textarea").get_attribute("value"),
            "progress": self.field("#progress").text,
            "table": self.field("#table").text,
            "picture": [
                picture[0].get_property("naturalWidth"),
                picture[0].get_attribute("src")[-200:],
            ]
            if picture
            else None,
        }

    def error(self):
        "What the page says is wrong, once; the message is closed."
        found = wait(
            "a message",
            lambda: [
                x.text
                for x in self.driver.find_elements(By.CSS_SELECTOR, ".toast-body, .toast-wrap")
                if x.text.strip()
            ],
        )
        for x in self.driver.find_elements(By.CSS_SELECTOR, ".toast-close"):
            x.click()
        wait(
            "the message to go",
            lambda: not self.driver.find_elements(By.CSS_SELECTOR, ".toast-body"),
        )
        return found[0]


def main(model):
    code = "import sys; from turboquant_nb.cli import main; sys.exit(main())"
    argv = [
        sys.executable,
        "-c",
        code,
        "web",
        "--model",
        model,
        "--port",
        "0",
        "--recipe",
        "k2v2",
        "k4v4",
    ]
    server, saw, pages = (
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True),
        {},
        [],
    )
    try:
        url = server.stdout.readline().strip()
        pages = [Page(url), Page(url)]
        one, two = pages
        saw["title"] = one.driver.title
        one.field("#draw").click()
        saw["nothing stored"] = one.error()
        one.ask("   ", 5)
        saw["empty"] = one.error()
        one.ask("Hello", 5000)
        saw["too many"] = one.error()
        one.ask("Call me Ishmael.", 24)  # two people at once
        two.ask("Some years ago, never mind how long.", 24)
        saw["one"], saw["two"] = one.done(), two.done()
        before = saw["one"]["picture"]
        one.write("#layer input", "1")
        one.field("#draw").click()
        wait("another picture", lambda: one.seen()["picture"] not in (None, before))
        one.write("#layer input", "7")
        one.field("#draw").click()
        saw["no such layer"] = one.error()
        if len(sys.argv) > 2:
            one.driver.save_screenshot(sys.argv[2])
    finally:
        for page in pages:
            page.driver.quit()
        server.send_signal(signal.SIGINT)
        try:
            saw["stderr"] = server.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    saw["code"] = server.returncode
    print(json.dumps(saw))


if __name__ == "__main__":
    main(sys.argv[1])
