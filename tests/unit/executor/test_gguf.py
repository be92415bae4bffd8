"""A GGUF file is served with exactly its own weights, and one that cannot be is refused in a sentence."""

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from bench.gguf_file import Values
from executor.cache.pool import KvPools
from executor.errors import ModelError
from executor.models.cpu import CpuModel
from executor.models.files import find
from executor.models.fingerprint import fingerprint
from executor.models.forward import Model
from executor.models.gguf.file import GgufFile
from executor.models.gguf.module import load_gguf, to_floats
from executor.models.llama import probe
from executor.models.load import load_model, model_of
from executor.models.torch import TorchForward
from tests.stack import model_cache
from tests.support.gguf_files import write_model
from tests.unit.executor.conftest import Driver, fused, load

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama with biases": lambda: LlamaConfig(**SIZES, attention_bias=True),
    "llama, tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2, tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES),
}


def of(kind: str, **others: str) -> Callable[[str], str]:
    """The type of each tensor: `kind`, but for the names, or names within a layer, that begin as is given."""

    def kind_of(name: str) -> str:
        own = re.sub(r"blk\.\d+\.", "", name)
        return next((other for begin, other in others.items() if own.startswith(begin)), kind)

    return kind_of


# What llama.cpp's quantizer makes of the output matrix, and mixtures that users make.
KINDS = {
    **{kind: of(kind) for kind in ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32")},
    "Q4_0 as quantized": of("Q4_0", **{"output.": "Q6_K"}),
    "Q4_1 and Q8_0": of("Q4_1", token_embd="Q8_0", **{"output.": "Q8_0"}),
    "all mixed": of("Q8_0", attn_v="Q4_0", ffn_up="F16", ffn_down="Q4_1", token_embd="Q6_K"),
}


def random_module(config: PretrainedConfig) -> Any:
    """Weights large enough that greedy outputs vary."""
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                parameter.normal_(0, 0.1)
            else:
                parameter.uniform_(0.7, 1.3)
    module.generation_config.eos_token_id = None
    return module


def load_file(path: Path, dtype: str = "float32", *, compiled: bool = True) -> Model:
    folder = model_cache() / "compiled" if compiled else None
    return load_model(find(str(path), path.parent), torch.device("cpu"), dtype, compiled_folder=folder)


def both(tmp_path: Path, family: str, kinds: Callable[[str], str], **metadata: Any) -> tuple[Path, Path]:
    """A GGUF file, and a folder with the floats that its codes stand for."""
    module = random_module(FAMILIES[family]())
    write_model(module, tmp_path / "model.gguf", kinds, metadata)
    module.save_pretrained(tmp_path / "floats")
    return tmp_path / "model.gguf", tmp_path / "floats"


def logits(model: Model) -> torch.Tensor:
    return probe(model.forward, model.groups, model.vocab_size, model.dtype, model.device)


def greedy(model: Model) -> list[int]:
    return [sampled.token_id for sampled in Driver(model).generate(1, [5, 80, 17, 200, 3], 40)]


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama with biases"}))
def test_a_file_computes_what_its_floats_compute(family: str, kinds: Callable[[str], str], tmp_path: Path) -> None:
    file, folder = both(tmp_path, family, kinds)
    direct, floats = load_file(file), load(folder)
    assert isinstance(direct.forward, CpuModel)
    assert logits(direct).equal(logits(floats))
    assert greedy(direct) == greedy(floats)


@pytest.mark.parametrize("kinds", ["Q4_1", "Q8_0", "all mixed"])
def test_a_file_computes_the_same_in_bfloat16(kinds: str, tmp_path: Path) -> None:
    file, folder = both(tmp_path, "llama", KINDS[kinds])
    floats = load_model(
        find(str(folder), folder), torch.device("cpu"), "bfloat16", compiled_folder=model_cache() / "compiled"
    )
    assert logits(load_file(file, "bfloat16")).equal(logits(floats))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_runs_on_torch_where_nothing_faster_does(family: str, tmp_path: Path) -> None:
    file, folder = both(tmp_path, family, KINDS["Q4_0 as quantized"] if "tied" not in family else KINDS["Q4_0"])
    model = load_file(file, compiled=False)
    assert isinstance(model.forward, TorchForward)
    assert logits(model).equal(logits(load_model(find(str(folder), folder), torch.device("cpu"), "float32")))


def test_codes_take_the_bytes_that_the_file_has(tmp_path: Path) -> None:
    module = random_module(LlamaConfig(**{**SIZES, "vocab_size": 320}))
    write_model(module, tmp_path / "model.gguf", of("Q4_0", token_embd="Q8_0", **{"output.": "Q8_0"}))
    model = load_file(tmp_path / "model.gguf")
    assert isinstance(model.forward, CpuModel)
    # Four bits take an offset beside the scale, as those of Q4_1 do.
    layers = sum(
        tensor.n_elements // 32 * 20
        for tensor in GGUFReader(tmp_path / "model.gguf").tensors
        if "Q4_0" in tensor.tensor_type.name
    )
    assert model.forward.decoder.weight_bytes == layers + 2 * 320 * 256 // 32 * 34


def test_frequencies_that_a_tensor_changes(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    module = random_module(LlamaConfig(**SIZES, rope_parameters=rope))
    plain = 1e4 ** -(torch.arange(0, 32, 2) / 32)
    factors = (plain / module.model.rotary_emb.inv_freq).numpy()
    file = tmp_path / "model.gguf"
    write_model(module, file, of("Q8_0"), **{"rope_freqs.weight": (factors, "F32")})
    module.save_pretrained(tmp_path / "floats")
    torch.testing.assert_close(logits(load_file(file)), logits(load(tmp_path / "floats")))


def test_linear_scaling(tmp_path: Path) -> None:
    module = random_module(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    )
    file = tmp_path / "model.gguf"
    write_model(module, file, of("F16"), {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    module.save_pretrained(tmp_path / "floats")
    assert logits(load_file(file)).equal(logits(load(tmp_path / "floats")))


def test_ends_of_an_output_come_from_the_metadata(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    file, _ = both(tmp_path, "llama", of("F32"), **ends)
    assert load_file(file).eos_token_ids == (7, 9)


@pytest.mark.parametrize(("kind", "auto"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)])
def test_a_files_own_type(kind: str, auto: torch.dtype, tmp_path: Path) -> None:
    file, _ = both(tmp_path, "llama", of(kind))
    assert load_gguf(file, None).dtype == auto


def test_a_fingerprint_sees_a_change_in_the_middle(tmp_path: Path) -> None:
    file, _ = both(tmp_path, "llama", of("Q4_0"))
    model, files = load_file(file), find(str(file), tmp_path)
    pools = KvPools(model.groups, 1, 16, model.dtype, model.device)
    before = fingerprint(model, files, pools)
    assert fingerprint(model, files, pools) == before
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert fingerprint(model, files, pools) != before


def test_the_reader_finds_what_the_librarys_reader_finds(tmp_path: Path) -> None:
    file, _ = both(
        tmp_path, "qwen3", KINDS["all mixed"], **{"tokenizer.ggml.scores": [0.5, -1.0], "general.x": ["ä", "b"]}
    )
    ours, theirs = GgufFile(file), GGUFReader(file)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {one.name: one.tensor_type.name for one in theirs.tensors} == dict(ours.kinds)
    for one in theirs.tensors:
        if one.data.ndim == 2:
            stored = ours.matrix(one.name).parts[0].data.numpy()
            assert (stored == one.data.view(np.uint8)).all()


Change = Callable[[Path], None]


def cut(size: int) -> Change:
    """Cuts a file to N = `size` bytes."""

    def change(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:size])

    return change


def patched(at: int, with_bytes: bytes) -> Change:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at : at + len(with_bytes)] = with_bytes
        path.write_bytes(content)

    return change


DAMAGED: dict[str, tuple[Change, str]] = {
    "empty": (cut(0), "cannot read the model"),
    "another magic": (patched(0, b"GGML"), r"no GGUF file: it begins with b'GGML'"),
    "version 1": (patched(4, struct.pack("<I", 1)), r"version 1; the executor reads versions 2 and 3"),
    "big-endian": (patched(4, struct.pack(">I", 3)), r"big-endian"),
    "cut in its magic": (cut(2), r"no GGUF file: it begins with b'GG'"),
    "cut in its version": (cut(6), r"cut off after 6 bytes, in its version"),
    "cut in its metadata": (cut(200), r"cut off after 200 bytes, before field 5 of 13 of its metadata"),
    "cut in its weights": (cut(200_000), r"cut off after \d+ bytes, in or before [\w.]+, which ends at byte \d+"),
    "more fields than there are": (patched(16, struct.pack("<Q", 2**40)), r"cut off|damaged|unknown"),
    "more tensors than there are": (patched(8, struct.pack("<Q", 2**40)), r"cut off|damaged|unknown|twice"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused(case: str, tmp_path: Path) -> None:
    change, words = DAMAGED[case]
    file, _ = both(tmp_path, "llama", of("Q4_0"))
    change(file)
    refused(file, words)


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_model(random_module(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})), folder / "small.gguf", of("Q4_0"))
    return folder / "small.gguf"


@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_any_changed_byte_of_the_header_gives_a_file_or_a_sentence(at: int, value: int, small_file: Path) -> None:
    changed = small_file.with_name("changed.gguf")
    changed.write_bytes(small_file.read_bytes())
    patched(at, bytes([value]))(changed)
    try:
        load_gguf(changed, torch.float32)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017


INSTEAD = "serve the model's safetensors instead$"
LACKING = {
    "architecture": (
        {"general.architecture": "falcon"},
        r"model\.gguf is of the architecture falcon.*serves GGUF files of llama, qwen2, qwen3: " + INSTEAD,
    ),
    "a size": ({"llama.block_count": None}, r"has no llama\.block_count"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, r"has no llama\.attention\.layer_norm_rms_epsilon"),
    "a size that is no number": ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv a list, which must be"),
    "experts": ({"llama.expert_count": 8}, r"llama\.expert_count.*is 8.*serves 0 only: " + INSTEAD),
    "part of a head rotated": (
        {"llama.rope.dimension_count": 16},
        r"rope\.dimension_count.*is 16.*serves 32 only: " + INSTEAD,
    ),
    "a rope of another kind": (
        {"llama.rope.scaling.type": "yarn"},
        r"rope\.scaling\.type.*is 'yarn'.*serves none or linear only: " + INSTEAD,
    ),
    "a field of no known meaning": (
        {"llama.logit_scale": 2.0},
        r"llama\.logit_scale, whose meaning the executor does not know: " + INSTEAD,
    ),
    "a part of a model": ({"split.count": 3, "split.no": 0}, r"part 1 of 3.*llama-gguf-split --merge"),
    "an end beyond the vocabulary": ({"tokenizer.ggml.eos_token_id": 300}, r"eos_token_id 300.*below 300"),
    "more layers than tensors": ({"llama.block_count": 3}, r"lacks the tensors blk\.2\.attn_norm\.weight"),
    "fewer layers than tensors": ({"llama.block_count": 1}, r"does not use: blk\.1\.attn_k"),
    "another width": ({"llama.feed_forward_length": 64}, r"ffn_gate\.weight of the shape \[96, 256\].*\[64, 256\]"),
}


@pytest.mark.parametrize("case", LACKING)
def test_metadata_that_cannot_be_served_are_refused(case: str, tmp_path: Path) -> None:
    metadata, words = LACKING[case]
    file, _ = both(tmp_path, "llama", of("Q4_0"), **metadata)
    refused(file, words)


def test_another_type_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    rows = np.zeros((256, 96 // 32 * 22), np.uint8)
    extra: dict[str, Values] = {"blk.1.ffn_down.weight": (rows, "Q5_0")}
    write_model(random_module(LlamaConfig(**SIZES)), tmp_path / "model.gguf", of("Q4_0"), {}, **extra)
    refused(
        tmp_path / "model.gguf", r"stores blk\.1\.ffn_down\.weight in Q5_0, which.*Q4_0, Q4_1, Q8_0, F32, F16, BF16"
    )


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    file, _ = both(tmp_path, "llama", of("Q4_0"))
    [tensor] = [one for one in GGUFReader(file).tensors if one.name == "blk.0.ffn_down.weight"]
    patched(int(tensor.data_offset), np.float16(np.nan).tobytes())(file)
    refused(file, "no numbers in float32")


def test_a_folder_of_a_file_names_the_file(tmp_path: Path) -> None:
    file, _ = both(tmp_path, "llama", of("F32"))
    (tmp_path / "only").mkdir()
    file.rename(tmp_path / "only/model.gguf")
    with pytest.raises(ModelError, match=r"name the file itself: .*only/model\.gguf"):
        load(tmp_path / "only")


def refused(file: Path, words: str) -> None:
    with pytest.raises(ModelError) as error:
        load_file(file)
    assert re.search(words, str(error.value)), error.value
    assert "\n" not in str(error.value)


def test_floats_of_a_file_run_on_the_fused_layers(tmp_path: Path) -> None:
    file, folder = both(tmp_path, "qwen3", KINDS["all mixed"])
    module = load_gguf(file, torch.float32)
    to_floats(module, torch.device("cpu"))
    model = model_of(module, "m")
    forward = fused(TorchForward(module), module, model)
    assert not isinstance(forward, TorchForward)
    expected = logits(load_model(find(str(folder), folder), torch.device("cpu"), "float32"))
    torch.testing.assert_close(logits(replace(model, forward=forward)), expected)
