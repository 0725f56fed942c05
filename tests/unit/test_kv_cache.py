"""KV caches in mlx-lm's protocol: what they hold, what attention over them is, what is refused and when."""

from __future__ import annotations

import copy
import logging

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import deepseek_v3, gemma2, gemma3_text, llama, qwen3_next
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from tests.oracles import kv as oracle
from tqtool.errors import UserError
from tqtool.kv import attention, codec
from tqtool.kv.cache import AffineKVCache, TurboKVCache, cache_bytes_per_token, make_caches, use_windows
from tqtool.kv.scheme import parse_scheme
from tqtool.kv.trace import facts_of
from tqtool.pipeline.inspection import _sizes

TURBO = parse_scheme("turbo:k8v3")


def build(module, **settings):
    mx.random.seed(1)
    base = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 50, "rms_norm_eps": 1e-5}
    model = module.Model(module.ModelArgs(model_type=module.__name__.rpartition(".")[2], **base | settings))
    mx.eval(model.parameters())
    return model


def tiny_llama(head_dim=64, **settings):
    return build(llama, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, **settings)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def tokens(count, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, 50, (1, count)))


def random(tokens, head_dim=128, heads=2, seed=0):
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal((1, heads, tokens, head_dim)).astype(np.float32)) for _ in range(2)]


def held(cache):
    """The records of the tokens that are held."""
    return np.array(cache.records[:, :, : cache.offset])


def filled(pieces, head_dim=128):
    keys, values = random(sum(pieces), head_dim)
    cache, first = TurboKVCache(TURBO), 0
    for piece in pieces:
        fetched = cache.update_and_fetch(keys[:, :, first : first + piece], values[:, :, first : first + piece])
        first += piece
    return cache, fetched, keys, values


# ------------------------------------------------------------------------------------------------- what is held
def test_two_hundred_bytes_a_token_and_head():
    """k8v3, head dimension 128: what the live cache allocates, for 2 heads and room for 256 tokens at a time."""
    cache, _, _, _ = filled([1])
    assert cache.nbytes == 200 * 2 * 256
    cache, _, _, _ = filled([256, 1])
    assert cache.nbytes == 200 * 2 * 512


@pytest.mark.parametrize("pieces", [[300], [255, 1, 1, 43], [1] * 5 + [295], [256, 44]])
def test_growth_and_pieces_do_not_change_what_is_held(pieces):
    cache, (keys, values), new_keys, new_values = filled(pieces)
    assert cache.offset == cache.size() == 300
    np.testing.assert_array_equal(held(cache), codec.encode(np.array(new_keys), np.array(new_values), TURBO))
    decoded = codec.decode(held(cache), 128, TURBO)
    np.testing.assert_array_equal(np.array(keys), decoded[0])
    np.testing.assert_array_equal(np.array(values), decoded[1])


def test_fetched_arrays_have_the_dtype_of_what_is_appended():
    keys, values = (array.astype(mx.bfloat16) for array in random(3))
    fetched = TurboKVCache(TURBO).update_and_fetch(keys, values)
    assert {array.dtype for array in fetched} == {mx.bfloat16}


def test_trimmed_tokens_are_forgotten():
    cache, _, keys, values = filled([300])
    assert cache.is_trimmable()
    assert cache.trim(60) == 60
    cache.update_and_fetch(keys[:, :, 240:], values[:, :, 240:])
    np.testing.assert_array_equal(held(cache), held(filled([300])[0]))
    assert cache.trim(1000) == 300
    assert cache.offset == 0


def test_copies_are_independent():
    cache, _, keys, values = filled([10])
    other, before = copy.deepcopy(cache), held(cache)
    other.trim(5)
    other.update_and_fetch(keys[:, :, :5] + 1, values[:, :, :5])
    np.testing.assert_array_equal(held(cache), before)
    assert (held(other) != before).any()


# ------------------------------------------------------------------------------------------------ through models
@pytest.mark.parametrize("text", ["turbo", "turbo:k4v2", "affine8", "affine4"])
@pytest.mark.parametrize("start", [0, 7])
def test_saved_caches_go_on_as_if_nothing_had_happened(model, text, start, tmp_path):
    scheme = parse_scheme(text)
    for length in (5, 20):  # before the start, and after
        caches = make_caches(model, scheme, start=start)
        for piece in (tokens(length), tokens(1)):
            model(piece, cache=caches)
        save_prompt_cache(str(tmp_path / "cache.safetensors"), caches, {"scheme": scheme.name})
        loaded, metadata = load_prompt_cache(str(tmp_path / "cache.safetensors"), return_metadata=True)
        use_windows(model, loaded)
        assert metadata == {"scheme": scheme.name}
        assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
        assert [cache.nbytes for cache in loaded] == [cache.nbytes for cache in caches]
        for step in range(4):
            one, other = (model(tokens(2, seed=step), cache=each) for each in (caches, loaded))
            np.testing.assert_array_equal(np.array(one), np.array(other))


def test_empty_caches_can_be_saved(model, tmp_path):
    save_prompt_cache(str(tmp_path / "cache.safetensors"), make_caches(model, TURBO))
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert all(cache.empty() and cache.nbytes == 0 for cache in loaded)
    assert np.isfinite(np.array(model(tokens(3), cache=loaded))).all()


def test_whole_windows_see_what_decoding_sees(model):
    """What `eval` scores in one pass is what token by token gives.

    Sums of another order move a key by an ulp, and now and then a code by one: far less than what packing costs.
    """
    full = np.array(model(tokens(40), cache=make_prompt_cache(model)))
    for text in ("turbo", "affine4"):
        whole = model(tokens(40), cache=make_caches(model, parse_scheme(text)))
        caches = make_caches(model, parse_scheme(text))
        single = mx.concatenate([model(tokens(40)[:, i : i + 1], cache=caches) for i in range(40)], axis=1)
        moved, lost = np.array(whole - single), np.array(whole) - full
        assert np.square(moved).mean() < 0.01 * np.square(lost).mean()


def test_attention_before_the_inverse_rotation_is_the_same(model):
    """Windows (deferred) against decoded arrays (every value rotated back): equal but for rounding."""
    deferred, eager = make_caches(model, TURBO), make_caches(model, TURBO)
    assert all(cache.as_windows for cache in deferred)
    for cache in eager:
        cache.as_windows = False
    for length in (30, 1, 1, 5):
        one, other = (model(tokens(length, seed=length), cache=caches) for caches in (deferred, eager))
        np.testing.assert_allclose(np.array(one), np.array(other), atol=2e-5)


def test_attention_against_the_oracle():
    """Float64 attention over records that a decoder written from the page has read."""
    cache, _, _, _ = filled([37], head_dim=64)
    queries = np.random.default_rng(3).standard_normal((1, 6, 1, 64)).astype(np.float32)
    window = attention.PackedWindow(cache, (1, 2, 37, 64), mx.float32)
    found = attention.attention(mx.array(queries), window, window, cache, 0.125, None)
    read = [[oracle.decode(record, 64, 8, 3) for record in head] for head in held(cache)[0]]
    keys, values = (np.array([[token[part] for token in head] for head in read]) for part in (0, 1))
    expected = oracle.attention(queries[0, :, 0], keys, values, 0.125)
    np.testing.assert_allclose(np.array(found)[0, :, 0], expected, atol=1e-5)


@pytest.mark.parametrize("text", ["turbo", "affine4"])
def test_start_keeps_floats_until_then(model, text):
    full, caches = make_prompt_cache(model), make_caches(model, parse_scheme(text), start=8)
    for length, is_full in ((5, True), (4, True), (3, False)):
        one, other = (np.array(model(tokens(length, seed=length), cache=each)) for each in (full, caches))
        assert np.array_equal(one, other) == is_full
        assert all(hasattr(cache, "bits") == (text == "affine4" and not is_full) for cache in caches)
    at_once = make_caches(model, parse_scheme(text))
    for length in (5, 4, 3):
        model(tokens(length, seed=length), cache=at_once)
    if text == "turbo":  # the first layer's keys and values do not depend on attention
        np.testing.assert_array_equal(held(caches[0]), held(at_once[0]))
    assert trim_prompt_cache(caches, 2) == 2


@pytest.mark.parametrize("text", [None, "turbo", "turbo:k4v5", "affine8", "affine4"])
def test_projected_bytes_are_allocated_bytes(model, text):
    scheme = parse_scheme(text)
    caches = make_caches(model, scheme)
    model(tokens(300), cache=caches)
    room = 512
    assert sum(cache.nbytes for cache in caches) == room * cache_bytes_per_token(model, scheme)


def test_full_cache_is_mlx_lms(model):
    assert [type(cache) for cache in make_caches(model, None)] == [KVCache, KVCache]
    assert [type(cache) for cache in make_caches(model, parse_scheme("affine8"))] == [QuantizedKVCache] * 2
    assert [type(cache) for cache in make_caches(model, parse_scheme("affine8"), start=1)] == [AffineKVCache] * 2


# ----------------------------------------------------------------------------------------------------- refusals
def test_batches_are_refused(model):
    caches = make_caches(model, TURBO)
    assert not any(hasattr(cache, "merge") for cache in caches)
    with pytest.raises(UserError, match="a batch of 2"):
        model(mx.zeros((2, 3), mx.int32), cache=caches)


@pytest.mark.parametrize(
    ("head_dim", "text", "message"),
    [(32, "turbo", "layer 0: head dimension 32"), (80, "turbo", "dimension 80"), (80, "affine8", "dimension 80")],
)
def test_head_dimensions_are_refused_before_anything_runs(head_dim, text, message):
    other = tiny_llama(head_dim)
    for ask in (make_caches, cache_bytes_per_token):
        with pytest.raises(UserError, match=message):
            ask(other, parse_scheme(text))


def test_latent_attention_is_refused():
    latent = build(
        deepseek_v3,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_intermediate_size=32,
        first_k_dense_replace=2,
        n_routed_experts=None,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        v_head_dim=32,
        qk_nope_head_dim=32,
    )
    with pytest.raises(UserError, match=r"keys of 64 and values of 16|keys of \d+ and values of \d+"):
        make_caches(latent, TURBO)


def test_sliding_layers_stay_with_one_warning(caplog):
    sliding = build(
        gemma3_text,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=16,
        sliding_window_pattern=3,
    )
    with caplog.at_level(logging.WARNING, "tqtool"):
        for _ in range(2):
            caches = make_caches(sliding, TURBO)
        make_caches(sliding, parse_scheme("turbo:k4v3"))
    assert [type(cache) for cache in caches] == [RotatingKVCache, RotatingKVCache, TurboKVCache] * 2
    assert [record.message for record in caplog.records] == [
        "KV scheme turbo:k8v3: 2 layers are packed, others stay as they are: 4 RotatingKVCache"
    ]
    assert cache_bytes_per_token(sliding, TURBO) == 2 * TURBO.bytes_per_token(64)
    full = np.array(sliding(tokens(40), cache=make_prompt_cache(sliding)))
    close = np.array(sliding(tokens(40), cache=make_caches(sliding, parse_scheme("turbo:k8v8"))))
    assert 0 < np.abs(close - full).max() < 0.05 * np.abs(full).max()


def test_recurrent_layers_stay():
    hybrid = build(
        qwen3_next,
        num_hidden_layers=4,
        full_attention_interval=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=0,
        num_experts_per_tok=0,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=0,
        mlp_only_layers=[0, 1, 2, 3],
        moe_intermediate_size=0,
        rope_theta=1e4,
        partial_rotary_factor=0.25,
        max_position_embeddings=64,
    )
    caches = make_caches(hybrid, TURBO)
    assert [type(cache).__name__ for cache in caches] == ["ArraysCache"] * 3 + ["TurboKVCache"]
    assert np.isfinite(np.array(hybrid(tokens(9), cache=caches))).all()
    assert caches[3].nbytes == 256 * cache_bytes_per_token(hybrid, TURBO)


def test_inspect_counts_the_layers_whose_cache_grows_in_mlx_lm():
    """gemma2's config names windows, mlx-lm keeps every token in every layer; of latent attention nothing is said."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    live = cache_bytes_per_token(build(gemma2, **shape), TURBO)
    config = {"model_type": "gemma2", "num_hidden_layers": 2, "hidden_size": 64, **shape}
    kinds = ["sliding_attention", "full_attention"]
    shown = {row.scheme: row.bytes_per_token for row in _sizes({**config, "layer_types": kinds}).kv}
    assert shown["turbo:k8v3"] == live
    sliding = {row.scheme: row for row in _sizes({**config, "model_type": "olmo3", "layer_types": kinds}).kv}
    assert sliding["turbo:k8v3"].bytes_per_token == live // 2
    assert _sizes({**config, "model_type": "deepseek_v3", "kv_lora_rank": 64}).kv == ()


def test_models_with_attention_of_their_own_get_arrays():
    """gemma2 multiplies keys itself: its caches return arrays, and the result is as close."""
    own = build(gemma2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    assert not facts_of(own).takes_windows
    caches = make_caches(own, parse_scheme("turbo:k8v8"))
    found = np.array(own(tokens(12), cache=caches))
    full = np.array(own(tokens(12), cache=make_prompt_cache(own)))
    assert 0 < np.abs(found - full).max() < 0.05 * np.abs(full).max()


def test_installed_attention_is_mlx_lms_for_arrays(model):
    """A second model of the same class, with stock caches: the same bits as before."""
    queries, keys, values = (random(7, heads=heads)[0] for heads in (4, 2, 2))
    assert llama.scaled_dot_product_attention is attention.attention
    one = attention.attention(queries, keys, values, KVCache(), 0.1, "causal")
    other = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask="causal")
    np.testing.assert_array_equal(np.array(one), np.array(other))
