"""The compiled decoder's structures and functions, as its headers and decoder.cpp declare them."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int64, c_void_p

import torch

# How a matrix lies in memory: the compiled code's Stored.
FLOATS, BF16, SQUEEZED_2, SQUEEZED_3, SQUEEZED_4, CODES_4, CODES_8, ROUNDED_4, ROUNDED_8 = range(9)
SQUEEZED = (SQUEEZED_2, SQUEEZED_3, SQUEEZED_4)
# What caches hold: the compiled code's Cached.
CACHED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
# A file's blocks that can be packed without becoming floats: the compiled code's BlockKind, and the bits of a code.
BLOCK_KINDS = {"Q4_0": (0, 4), "Q4_1": (1, 4), "Q8_0": (2, 8)}


class Linear(ctypes.Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("stored", c_int64),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("group", c_int64),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("layers", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("vocabulary", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("epsilon", c_float),
        ("attention_scale", c_float),
        ("rotary_scale", c_float),
        ("frequencies", c_void_p),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("embedding_stored", c_int64),
        ("cached", c_int64),
        ("table", Linear),
        ("head", Linear),
        ("layer", POINTER(Layer)),
    )


class Group(ctypes.Structure):
    _fields_ = (
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("width", c_int64),
        ("window", c_int64),
    )


class Scored(ctypes.Structure):
    _fields_ = (
        ("sequence", c_int64),
        ("rows", c_int64),
        ("keys", c_int64),
        ("weights", c_void_p),
        ("squares", c_void_p),
        ("totals", c_void_p),
        ("heads", c_int64),
        ("capacity", c_int64),
        ("first", c_int64),
        ("width", c_int64),
    )


# Most projections that a matrix joins.
MOST_PARTS = 3


class AdapterMatrix(ctypes.Structure):
    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("rank", c_int64),
        ("parts", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("scale", c_float * MOST_PARTS),
    )


class AdapterSpan(ctypes.Structure):
    _fields_ = (
        ("adapter", c_void_p),
        ("begin", c_int64),
        ("end", c_int64),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("groups", c_int64),
        ("outputs", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("group", POINTER(Group)),
        ("rows", c_void_p),
        ("cache_positions", c_void_p),
        ("entries", c_int64),
        ("scored", POINTER(Scored)),
        ("invariant", c_int64),
        ("spans", c_int64),
        ("span", POINTER(AdapterSpan)),
    )


def declare(library: ctypes.CDLL) -> None:
    library.decoder_tile.restype = c_int64
    library.decoder_width.restype = c_int64
    library.decoder_phases.restype = c_int64
    library.decoder_prefers_products.restype = ctypes.c_int
    library.decoder_can_squeeze.restype = ctypes.c_int
    library.decoder_allocate.restype = c_void_p
    library.decoder_allocate.argtypes = [c_int64]
    library.decoder_free.argtypes = [c_void_p]
    library.decoder_free.restype = None
    library.decoder_packed_bytes.argtypes = [c_int64] * 3
    library.decoder_packed_bytes.restype = c_int64
    library.decoder_pack.argtypes = [c_void_p, c_void_p, *[c_int64] * 3]
    library.decoder_pack.restype = c_int64
    library.decoder_pack_blocks.argtypes = [c_void_p, c_void_p, *[c_int64] * 4]
    library.decoder_pack_blocks.restype = c_int64
    library.decoder_adapter.argtypes = [c_void_p, c_int64, ctypes.c_int]
    library.decoder_adapter.restype = c_void_p
    library.decoder_drop_adapter.argtypes = [c_void_p]
    library.decoder_drop_adapter.restype = None
    library.decoder_team.restype = c_void_p
    library.decoder_team.argtypes = [c_void_p, ctypes.c_int]
    library.decoder_disband.argtypes = [c_void_p]
    library.decoder_disband.restype = None
    library.decoder_step.argtypes = [*[c_void_p] * 4, POINTER(c_double), ctypes.c_int]
    library.decoder_step.restype = None
