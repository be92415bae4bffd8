"""Real prompts of chosen lengths: questions about English technical prose that comes with every Python."""

from collections.abc import Callable
from pydoc_data.topics import topics

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences how a hash table finds a key.",
    "Name three rivers in South America and one fact about each.",
    "Why is the sky blue at noon and red in the evening?",
    "Write a haiku about the sea in winter.",
    "What is the difference between a process and a thread?",
    "Give a recipe for pancakes for four people.",
    "Translate into French: the train leaves at seven in the morning.",
)
# Sections of the language reference that are mainly prose, the longest last.
SECTIONS = ("context-managers", "exceptions", "assignment", "naming", "types", "class", "import", "specialnames")


def chat(content: str) -> str:
    """One user turn in the form of SmolLM2's chat template, ready to be encoded as plain text."""
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def prose(index: int) -> str:
    """English prose, some hundred thousand characters; the beginning is one of a few."""
    return topics[SECTIONS[index % len(SECTIONS)]] + topics["specialnames"] + topics["types"]


def prompts(
    count: int, encode: Callable[[str], list[int]], *, shortest: int = 20, longest: int = 1500
) -> list[list[int]]:
    """`count` prompts as token ids with lengths spread geometrically over shortest..longest tokens.

    The first prompts are short questions; longer prompts have a different piece of prose each before a question.
    """
    result = []
    for index in range(count):
        length = round(shortest * (longest / shortest) ** (index / max(count - 1, 1)))
        question = encode(chat(QUESTIONS[index % len(QUESTIONS)]))
        if len(question) >= length:
            result.append(question[: max(length, shortest)])
            continue
        text = encode(f"Text {index}: " + prose(index)[index * 97 :])
        result.append(text[: length - len(question)] + question)
    return result


def shared_prefix_prompts(
    count: int,
    encode: Callable[[str], list[int]],
    *,
    prefix: int = 1024,
    own: tuple[int, int] = (32, 64),
    variant: int = 0,
) -> list[list[int]]:
    """`count` prompts that begin with the same `prefix` tokens and go on with own[0]..own[1] tokens of their own."""
    common = encode(f"Variant {variant}. " + topics["specialnames"])[:prefix]
    low, high = own
    step = (high - low) / max(count - 1, 1)
    tails = (encode(f"Question {index}: " + prose(index)[index * 131 :]) for index in range(count))
    return [common + tail[: round(low + step * index)] for index, tail in enumerate(tails)]
