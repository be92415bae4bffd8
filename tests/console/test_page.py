"""The page in a headless browser: it shows the cache, by keyboard too, and asks no other host for anything."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from bench.driver import Driver
from protos.rpc.identity import Role
from protos.rpc.security import Security
from tests.console.conftest import CHROMIUM, SECRET, Console, fill, served, small
from tests.support.generation import generate, greedy_request
from tests.support.in_process_manager import asked
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.stack import prompt_of

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
    # One browser for all.
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Also the limit of every expectation without a separate limit.
        expect.set_options(timeout=patience(15) * 1000)
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def console() -> AsyncIterator[Console]:
    async with served(small()) as console:
        yield console


@asynccontextmanager
async def opened(browser: Browser, console: Console, allowed: str = "403", **options: object) -> AsyncIterator[Page]:
    """The page, which must say nothing on its console and go nowhere else. allowed: a status that it may tell of."""
    problems: list[str] = []
    context = await browser.new_context(viewport={"width": 1280, "height": 1000}, **options)  # type: ignore[arg-type]
    page = await context.new_page()
    page.set_default_timeout(patience(15) * 1000)
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda to: problems.append(to.url) if not to.url.startswith(console.url) else None)
    try:
        await page.goto(console.url)
        yield page
    finally:
        await context.close()
    assert [problem for problem in problems if "401" not in problem and allowed not in problem] == []


async def finds(page: Page, script: str, wanted: object) -> None:
    """Waits until a script finds this on the page: the page draws data only in the next frame."""
    deadline = time.monotonic() + patience(15)
    while (found := await page.evaluate(script)) != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert found == wanted


# Whether a canvas has several colours.
COLOURS = """() => {{
    const map = document.getElementById("{name}");
    const data = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
    return new Set(new Uint32Array(data.buffer)).size >= 4;
}}"""


async def test_the_page_shows_all_of_it(browser: Browser, console: Console) -> None:
    async with opened(browser, console) as page:
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        used = console.driver.pool.used_blocks
        await expect(page.locator("#map-count")).to_contain_text(f"{used} in use")
        await expect(page.locator("#gauges")).to_contain_text("prompt tokens")
        for name, text in {
            "tenants": "globex",
            "leases": "session/s1",
            "events": "stored",
            "tree": " hits",
            "ghosts-text": "are sampled",
        }.items():
            await expect(page.locator(f"#{name}")).to_contain_text(text)
        await expect(page.locator("#leases")).to_contain_text("5 min")
        await expect(page.locator("#tenants")).to_contain_text("at most 100")
        assert str(SECRET)[:7] not in (await page.content()).replace(",", "")


async def test_the_longest_sequences_are_shown_with_the_slots_that_they_waste(
    browser: Browser, console: Console
) -> None:
    [live] = console.driver.manager.queries.sequences()
    async with opened(browser, console) as page:
        text = page.locator("#sequences-text")
        await expect(text).to_have_text(
            f"1 sequence has blocks for {live.capacity} tokens; {live.capacity - live.computed} of these slots have no "
            "token."
        )
        await expect(page.locator("#sequences")).to_contain_text("running")
        for number in range(25):
            console.driver.admit(f"more {number}", range(5_000 + 100 * number, 5_040 + 100 * number))
        await expect(text).to_contain_text("sequences have", timeout=patience(30) * 1000)
        await expect(page.locator("#sequences tr")).to_have_count(1 + 20)


async def test_slots_of_sequences_that_evict_are_not_counted_as_empty(browser: Browser, console: Console) -> None:
    [live] = console.driver.manager.queries.sequences()
    policy = asked("SLIDING_WINDOW", recent_tokens=32)
    console.driver.admit("evicts", range(7_000, 7_040), eviction_policy=policy)
    *_, evicting = console.driver.manager.queries.sequences()
    assert evicting.eviction is not None
    evicting.eviction.has_begun = True
    async with opened(browser, console) as page:
        await expect(page.locator("#sequences-text")).to_have_text(
            f"2 sequences have blocks for {live.capacity + evicting.capacity} tokens; {live.capacity - live.computed} "
            f"of the {live.capacity} slots of sequences that keep all tokens have no token."
        )
        await expect(page.locator("#sequences")).to_contain_text("evicts tokens")


async def test_the_map_is_coloured_and_walked_by_keyboard(browser: Browser, console: Console) -> None:
    async with opened(browser, console) as page:
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        await page.keyboard.press("2")
        await expect(page.get_by_role("radio", name="Tenant")).to_have_attribute("aria-checked", "true")
        await expect(page.locator("#legend")).to_contain_text("acme")
        await finds(page, COLOURS.format(name="map"), True)
        await page.locator("#map").focus()
        for key in ("Home", "ArrowRight"):
            await page.keyboard.press(key)
        await expect(page.locator("#block")).to_contain_text("Slot 2, device")
        await page.keyboard.press("End")
        await expect(page.locator("#block")).to_contain_text("Slot 200: empty")


async def test_a_page_that_is_opened_later_shows_the_services_and_the_past(browser: Browser, console: Console) -> None:
    for number in range(3):
        await console.look()
        console.driver.cache(f"large {number}", range(10_000 * number, 10_000 * number + 1_600))
    async with opened(browser, console, allowed="503") as page:
        await expect(page.locator("#parts")).to_contain_text("cachemgr ok")
        await expect(page.locator("#parts")).to_contain_text("scheduler not found")
        await expect(page.locator("#service")).to_contain_text("TTFT")
        blocks = page.get_by_role("img", name="Device blocks over the last ten minutes")
        await expect(blocks).to_have_attribute(
            "aria-label", re.compile(r"in use now \d+, least \d+, most \d+; cached now")
        )
        await finds(page, COLOURS.format(name="history-blocks"), True)
        await expect(page.locator("#history")).to_contain_text("cached")
        # A part that does not answer any more.
        await console.stop[0]()
        await console.look()
        await expect(page.locator("#parts .away")).to_contain_text("cachemgr", timeout=patience(30) * 1000)


async def test_events_are_chosen_by_kind_and_wait_while_the_list_is_paused(browser: Browser, console: Console) -> None:
    driver = console.driver
    async with opened(browser, console) as page:
        events = page.locator("#events")
        await expect(events).to_contain_text("lease granted")
        await page.get_by_label("Kind").select_option("stored")
        await expect(events).not_to_contain_text("lease granted")
        await expect(events).to_contain_text("before ")
        await page.get_by_role("button", name="Pause").click()
        driver.cache("late", range(50_000, 50_032), salt="initech", tenant_id="initech")
        await expect(page.locator("#paused")).to_contain_text("events since")
        first = await events.locator("tr").nth(1).inner_text()
        await page.get_by_role("button", name="Pause").click()
        await expect(events.locator("tr").nth(1)).not_to_have_text(first)
        await expect(events.locator("tr").nth(1)).to_contain_text(re.compile(r"^\d\d:\d\d:\d\d"))
        await expect(page.locator("#paused")).to_be_empty()


async def test_pins_come_first_and_a_narrow_page_shows_the_first_rows(browser: Browser, console: Console) -> None:
    async with opened(browser, console) as page:
        await expect(page.locator("#leases tr").nth(1)).to_contain_text("pin")
        await expect(page.locator("#ghosts")).to_contain_text("segmented LRU")
        await page.set_viewport_size({"width": 390, "height": 800})
        more = page.locator("#events + .more")
        await more.click(timeout=patience(30) * 1000)
        await expect(more).to_have_count(0)
        assert await page.locator("#events tr").count() > 7


async def test_the_tree_opens_and_closes_by_keyboard(browser: Browser, console: Console) -> None:
    async with opened(browser, console) as page:
        rows = page.get_by_role("treeitem")
        await expect(rows).to_have_count(3)
        await rows.first.focus()
        await page.keyboard.press("ArrowRight")
        await expect(rows.first).to_have_attribute("aria-expanded", "true")
        assert await rows.count() > 3
        await page.keyboard.press("ArrowDown")
        await expect(rows.nth(1)).to_be_focused()
        await page.keyboard.press("ArrowUp")
        await page.keyboard.press("ArrowLeft")
        await expect(rows).to_have_count(3)


async def test_dark_mode_follows_the_system_and_the_key(browser: Browser, console: Console) -> None:
    async with opened(browser, console, color_scheme="dark") as page:
        root = page.locator("html")
        await expect(root).to_have_attribute("data-theme", "dark")
        await page.keyboard.press("t")
        await expect(root).to_have_attribute("data-theme", "light")
        await page.reload()
        await expect(root).to_have_attribute("data-theme", "light")


async def test_events_arrive_and_what_is_new_is_shown(browser: Browser, console: Console) -> None:
    async with opened(browser, console) as page:
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        console.driver.cache("late", list(range(5_000, 5_100)), salt="initech", tenant_id="initech")
        await expect(page.locator("#tenants")).to_contain_text("initech", timeout=patience(30) * 1000)
        await expect(page.locator("#events")).to_contain_text(f"{console.driver.manager.queries.last_event:,}")


async def test_a_pool_of_100_000_blocks_is_shown(browser: Browser) -> None:
    driver = Driver(100_000)
    fill(driver)
    for number in range(100):
        driver.cache(f"long {number}", range(10_000 * number, 10_000 * number + 9_000))
    async with served(driver) as console, opened(browser, console) as page:
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes", timeout=patience(60) * 1000)
        await expect(page.locator("#map-count")).to_contain_text(f"{driver.pool.cached_blocks:,} cached")
        await page.locator("#map").focus()
        await page.keyboard.press("End")
        await expect(page.locator("#block")).to_contain_text("Slot 100000: empty")


async def test_a_token_is_asked_for_where_one_is_needed(browser: Browser, tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    token = keys.add(Role.VIEWER).token()
    async with served(small(), security=Security(tokens_file=keys.file)) as console, opened(browser, console) as page:
        await page.get_by_label("asks for a token").fill(token)
        await page.get_by_role("button", name="Show the cache").click()
        await expect(page.locator("#tenants")).to_contain_text("globex")


async def test_a_token_of_one_tenant_shows_that_tenant(browser: Browser, tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    token = keys.add(Role.VIEWER, "globex").token()
    async with served(small(), security=Security(tokens_file=keys.file)) as console, opened(browser, console) as page:
        await page.get_by_label("asks for a token").fill(token)
        await page.get_by_role("button", name="Show the cache").click()
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        await expect(page.locator("#tenants")).to_contain_text("globex")
        await expect(page.locator("#ghosts-text")).to_contain_text("concerns all tenants")
        assert "acme" not in await page.content()


WIDTHS = (2560, 1440, 1024, 390)
# What is wider than its box, or cut in it, by tag and text.
CUT = """() => [...document.querySelectorAll("body *")]
    .filter((one) => !one.closest("canvas, select, dialog") && one.scrollWidth > one.clientWidth + 1 && one.clientWidth)
    .map((one) => `${one.tagName} ${one.id} ${one.textContent.slice(0, 40)}: ${one.scrollWidth}, ${one.clientWidth}`)"""
# The cards of shards and engines that show a part of their rows only.
PARTS = """() => [...document.querySelectorAll("#shards .scroll, #engines .scroll")]
    .filter((one) => one.scrollHeight > one.clientHeight + 1).map((one) => one.parentElement.id)"""
# The empty widths at the right of all rows of cards, in pixels.
HOLES = """() => {
    const main = document.querySelector("main").getBoundingClientRect();
    const ends = new Map();
    for (const card of document.querySelectorAll("section")) {
        const { top, right } = card.getBoundingClientRect();
        ends.set(Math.round(top), Math.max(right, ends.get(Math.round(top)) ?? 0));
    }
    return [...new Set([...ends.values()].map((right) => Math.round(main.right - right)))];
}"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2])
async def test_nothing_is_cut_and_no_row_has_a_hole(browser: Browser, count: int, width: int) -> None:
    async with served(*(small() for _ in range(count))) as console, opened(browser, console) as page:
        await console.look()
        await page.set_viewport_size({"width": width, "height": 900})
        await expect(page.locator("#history-section")).to_be_visible()
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        await page.get_by_role("treeitem").first.click()
        await expect(page.get_by_role("treeitem").first).to_have_attribute("aria-expanded", "true")
        await page.locator("#map").focus()
        await page.keyboard.press("Home")
        await expect(page.locator("#block")).to_contain_text("Slot 1")
        await finds(page, "document.documentElement.scrollWidth", width)
        await finds(page, CUT, [])
        await finds(page, HOLES, [16])
        await finds(page, PARTS, [])


async def test_blocks_in_use_look_different_whatever_the_colours_stand_for(browser: Browser, console: Console) -> None:
    """Most of the pixels of a map have a colour of few."""
    script = """() => {
        const map = document.getElementById("map");
        const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
        const times = new Map();
        for (const one of new Uint32Array(data.buffer)) times.set(one, (times.get(one) ?? 0) + 1);
        return [...times.values()].filter((count) => count > map.width * map.height / 200).length;
    }"""
    async with opened(browser, console) as page:
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        await expect(page.locator("#legend")).to_contain_text("in use")
        await expect(page.locator("#legend")).to_contain_text("cached")
        # The page behind, empty, cached, in use.
        await finds(page, script, 4)


async def test_one_cache_manager_is_shown_without_a_word_of_others(browser: Browser, console: Console) -> None:
    async with opened(browser, console) as page:
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        headings = await page.get_by_role("heading", level=2).all_text_contents()
        assert not {"Shards", "Engines"} & set(headings)
        assert "shard" not in (await page.locator("#events").inner_text()).lower()
        assert await page.locator("#pool option").all_text_contents() == ["e/0"]


async def test_the_pools_of_two_shards_are_chosen_by_table_and_list(browser: Browser) -> None:
    """Both have a pool of one name."""
    one, other = small(), Driver(300)
    async with served(one, other) as console, opened(browser, console) as page:
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        await expect(page.locator("#shards")).to_contain_text(console.shards[1])
        first, second = (page.locator(f'#shards [data-pool="{shard} e/0"]') for shard in console.shards)
        await expect(first).to_have_attribute("aria-pressed", "true")
        await expect(page.locator("#gauges")).to_contain_text("device 200 blocks")
        await second.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#gauges")).to_contain_text("device 300 blocks")
        await expect(second).to_have_attribute("aria-pressed", "true")
        await expect(second).to_be_focused()
        await page.locator("#pool").select_option(label=f"e/0 at {console.shards[0]}")
        await expect(page.locator("#gauges")).to_contain_text("device 200 blocks")
        await expect(page.locator("#tenants")).to_contain_text("globex")
        other.cache("late", list(range(5_000, 5_100)), salt="initech", tenant_id="initech")
        for shard in console.shards:
            await expect(page.locator("#events")).to_contain_text(shard)


async def test_a_shard_that_is_gone_is_named_and_the_others_go_on(browser: Browser) -> None:
    async with served(small(), small()) as console, opened(browser, console, allowed="503") as page:
        await expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
        await console.stop[1]()
        await expect(page.locator("#state")).to_contain_text(
            f"{console.shards[1]} does not answer", timeout=patience(30) * 1000
        )
        await expect(page.locator("#shards")).to_contain_text("does not answer")
        console.driver.cache("late", list(range(5_000, 5_100)), salt="initech", tenant_id="initech")
        await expect(page.locator("#tenants")).to_contain_text("initech", timeout=patience(30) * 1000)


async def test_the_engines_of_a_router_are_shown(browser: Browser, tmp_path: Path) -> None:
    async with (
        run_fleet(tmp_path, policy="round-robin") as fleet,
        served(router=f"unix:{tmp_path}/router") as console,
        opened(browser, console) as page,
    ):
        await asyncio.gather(*[generate(fleet.stub, greedy_request(prompt_of(20, s), 4)) for s in range(4)])
        engines = page.locator("#engines")
        for text in ("round-robin", fleet.engines[0].address, "executor-1", "ready", "0 of 64", "complete"):
            await expect(engines).to_contain_text(text)
        await expect(engines.locator("tr").nth(1)).to_contain_text("2")
        await expect(page.locator("#shards")).to_contain_text("executor-0/0")
        fleet.engines[0].scheduler.requests.set_draining(True)
        await expect(engines).to_contain_text("takes no new requests", timeout=patience(10) * 1000)
