"""The pictures of docs/images, from a stack that really runs: `make pictures`."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import matplotlib as mpl
import resvg_py
from playwright.sync_api import expect, sync_playwright
from rich.console import Console

from kvctl.display.output import Format
from kvctl.display.screen import render
from kvctl.measure.readings import read
from kvctl.session import Session
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.console.conftest import CHROMIUM
from tests.stack import CONSOLE, MODULES, ROOT, Stack
from tests.support.patience import patience
from tests.support.ports import free_address

FOLDER = ROOT / "docs/images"
COLUMNS = 110
# Salts of the requests, each with how many of eight use it, and the tokens that its prompts have in common.
LOAD = {"acme": (4, 512), "globex": (2, 256), "initech": (1, 128)}
WARM_SECONDS, RATE_SECONDS = 30.0, 3.0
CLIENTS = 6


@contextlib.contextmanager
def loaded(stack: Stack) -> Iterator[None]:
    """Clients that ask one request after the other."""
    ended = threading.Event()

    def ask(number: int) -> None:
        rng = random.Random(number)
        with grpc.insecure_channel(stack.scheduler) as channel:
            stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
            while not ended.is_set():
                salt = rng.choice([name for name, (times, _) in LOAD.items() for _ in range(times)] + [""])
                _, common = LOAD.get(salt, (1, 0))
                prompt = [*shared(salt, common), *(rng.randrange(1000, 40_000) for _ in range(rng.randrange(32, 160)))]
                request = pb.StreamGenerateRequest(
                    token_ids=pb.TokenIds(token_ids=prompt), max_tokens=rng.randrange(8, 48), ignore_eos=True
                )
                if salt:
                    request.cache.salt = request.cache.tenant_id = salt
                for _ in stub.StreamGenerate(request, timeout=patience(60)):
                    pass

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def shared(salt: str, tokens: int) -> list[int]:
    """What all prompts of a salt begin with."""
    rng = random.Random(salt)
    return [rng.randrange(1000, 40_000) for _ in range(tokens)]


def set_quotas(stack: Stack) -> None:
    """Of two tenants."""
    with grpc.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceStub = kvcache_rpc.CacheAdminServiceStub(channel)
        for tenant, floor, ceiling in (("acme", 48, 160), ("globex", 16, 64)):
            quota = kv.Quota(tenant_id=tenant, device_floor_blocks=floor, device_ceiling_blocks=ceiling)
            admin.SetQuota(kv.SetQuotaRequest(quota=quota), timeout=patience(10))


def set_rule(stack: Stack) -> None:
    """What one of them leaves stays longer."""
    with grpc.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceStub = kvcache_rpc.CacheAdminServiceStub(channel)
        rule = kv.RetentionRule(name="globex-stays")
        rule.match.salt = "globex"
        rule.action.retention_priority = 80
        rule.action.retention_duration.FromSeconds(600)
        admin.CreateRetentionRule(kv.CreateRetentionRuleRequest(rule=rule), timeout=patience(10))


def pictures_of_console(url: str, folder: Path) -> None:
    """The page as a browser shows it, light and dark."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme, colours in (("light", "2"), ("dark", "4")):
            page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
            page.goto(url)
            expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
            page.keyboard.press(colours)
            page.get_by_role("treeitem").first.click()
            page.locator("#map").focus()
            page.keyboard.press("Home")
            expect(page.locator("#block")).to_contain_text("Slot 1")
            page.screenshot(path=folder / f"console-{scheme}.png", full_page=True)
            page.close()
        browser.close()


def pictures(folder: Path) -> None:
    """The console, and the screen of `kvctl top` as rich draws it."""
    console_address = free_address()
    metrics = {"scheduler": free_address(), "executor": free_address()}
    stack = Stack(
        executor_max_tokens=4096,
        executor_host_cache_size="256MiB",
        modules=MODULES | CONSOLE,
        console_address=console_address,
        scheduler_metrics_address=metrics["scheduler"],
        executor_metrics_address=metrics["executor"],
    )
    with stack, Session(stack.admin, "", stack.scheduler, 10.0, Format.TABLE) as session:
        set_quotas(stack)
        set_rule(stack)
        with loaded(stack):
            time.sleep(WARM_SECONDS)
            before = read(session, metrics)
            time.sleep(RATE_SECONDS)
            now = read(session, metrics)
            pictures_of_console(f"http://{console_address}", folder)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(before, now))
    svg = console.export_svg(title="kvctl top").replace("font-family: arial", "font-family: monospace")
    # The fonts that matplotlib brings: a machine without any draws the same.
    fonts = [str(Path(mpl.get_data_path()) / f"fonts/ttf/DejaVuSansMono{face}.ttf") for face in ("", "-Bold")]
    (folder / "kvctl-top.png").write_bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg, skip_system_fonts=True, font_files=fonts, monospace_family="DejaVu Sans Mono",
            font_family="DejaVu Sans Mono",
        )
    )  # fmt: skip


def main() -> None:
    """Writes them."""
    if CHROMIUM is None:
        sys.exit("pictures: there is no chromium on the PATH: apt-get install chromium")
    FOLDER.mkdir(parents=True, exist_ok=True)
    pictures(FOLDER)


if __name__ == "__main__":
    main()
