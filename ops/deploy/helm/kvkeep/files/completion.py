"""Asks for a completion as callers do, and checks the answer. The status is 0 if the answer is right."""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

ASKED = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
# A device may compile code for its first request.
SECONDS = 120


def ask(url):
    headers = {"Content-Type": "application/json"}
    if path := os.environ.get("TOKEN_FILE"):
        headers["Authorization"] = f"Bearer {Path(path).read_text().strip()}"
    # The service is in this cluster; a proxy for addresses outside of the cluster must not be used.
    handlers = [urllib.request.ProxyHandler({})]
    if path := os.environ.get("CA_FILE"):
        context = ssl.create_default_context(cafile=path)
        if certificate := os.environ.get("CERT_FILE"):
            context.load_cert_chain(certificate, os.environ["KEY_FILE"])
        handlers.append(urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(f"{url}/completions", json.dumps(ASKED).encode(), headers)  # noqa: S310
    with urllib.request.build_opener(*handlers).open(request, timeout=SECONDS) as answer:
        return json.load(answer)


def fault(answer):
    """What is wrong with an answer; empty when nothing is."""
    choices, usage = answer.get("choices") or [], answer.get("usage") or {}
    if len(choices) != 1 or choices[0].get("finish_reason") not in ("stop", "length"):
        return "the answer must have exactly one choice, with finish_reason stop or length"
    if not choices[0].get("text"):
        return "there is no text"
    if not usage.get("prompt_tokens") or not 0 < usage.get("completion_tokens", 0) <= ASKED["max_tokens"]:
        return "the usage must have prompt_tokens above 0, and completion_tokens from 1 to max_tokens"
    return ""


url = os.environ["URL"]
try:
    answer = ask(url)
except urllib.error.HTTPError as error:
    sys.exit(f"{url}: status {error.code}: {error.read(1000).decode(errors='replace')}")
except (OSError, ValueError) as error:
    sys.exit(f"{url}: {error}")
if wrong := fault(answer):
    sys.exit(f"{url}: {wrong}: {json.dumps(answer)}")
print(f"{ASKED['prompt']}{answer['choices'][0]['text']}")
