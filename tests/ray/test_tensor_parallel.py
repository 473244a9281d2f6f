"""A model over several ranks: the same logits and texts as on one, and nothing lost when a rank dies."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from specwire import Client, Completion, ConfigError, ModelLoadError, Rule, SamplingParams
from specwire.config.services import VerifyConfig
from specwire.config.stack import UpConfig
from specwire.engine import boot
from specwire.engine.batch import Feed
from specwire.engine.group import sharding
from specwire.engine.group.rank import AgreedReplay
from specwire.engine.group.runner import GroupRunner
from specwire.engine.model import loading, packing
from specwire.engine.model.runner import ModelRunner
from specwire.proposals.tree import TokenTree
from specwire.rule.captured import EagerReplay
from tests.support import rank_memory, texts
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.own_drafts import save_drafting
from tests.support.pairs import save_good_draft, save_target
from tests.support.processes import END_S, gone, running, wait_until
from tests.support.ray_cluster import connected_cluster
from tests.support.together import together
from verify_service.verifier import VerifyDecider

pytest.importorskip("ray")

START_S = 240.0
NUM_TOKENS = 160
STEP_TIMEOUT_S = 5.0
PROMPT = np.random.default_rng(5).integers(3, 97, 40).tolist()
#: Every kind of deciding, with drafts of a fixed length so that seeded text can be compared.
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, rule=Rule.GUMBEL, temperature=0.8),
    SamplingParams(seed=3, repetition_penalty=1.2, presence_penalty=0.3, top_k=20),
    SamplingParams(seed=4, top_p=0.8, logprobs=3),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, logit_bias={7: 2.0}),
]


cluster = entered(connected_cluster)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with an odd vocabulary, and a draft for it."""
    directory = tmp_path_factory.mktemp("models")
    return save_target(directory / "target"), save_good_draft(directory / "draft")


@pytest.fixture(scope="module")
def undisturbed(models: tuple[Path, Path]) -> list[Completion]:
    """What one rank says."""
    with local_stack(*models) as alone:
        return generate_all(alone.address, NUM_TOKENS)


@pytest.fixture(scope="class")
def started(cluster: Any, models: tuple[Path, Path]) -> Iterator[tuple[LocalStack, boot.ModelService]]:
    """The three services with target and draft on two ranks each, and the verify service behind the wire."""
    options = {"tensor_parallel_size": 2, "num_threads": 1, "step_timeout_s": STEP_TIMEOUT_S}
    with (
        started_services() as services,
        local_stack(*models, verify_options=options, draft_options=options) as stack,
    ):
        assert isinstance(services["draft"].runner, GroupRunner)
        yield stack, services["verify"]


def all_logits(question: object, logits: torch.Tensor) -> np.ndarray:
    """As a `device.Decide`: everything."""
    return logits.numpy()


def group_runner(service: boot.ModelService) -> GroupRunner:
    assert isinstance(service.runner, GroupRunner)
    return service.runner


def generate_all(address: str, num_tokens: int) -> list[Completion]:
    """One generation for each of `PARAMS`, all at once."""

    requests = [replace(params, max_tokens=num_tokens, ignore_eos=True) for params in PARAMS]
    return together(address, [(params, PROMPT[i:]) for i, params in enumerate(requests)])


@pytest.mark.slow
class TestTwoRanks:
    """Over real gRPC, draft and coordinator beside; greedy, sampled and Gumbel streams in the same steps."""

    def test_texts_and_logprobs_equal_those_of_one_rank(
        self, started: tuple[LocalStack, boot.ModelService], undisturbed: list[Completion]
    ) -> None:
        stack, service = started
        done = generate_all(stack.address, NUM_TOKENS)
        assert [one.token_ids for one in done] == [one.token_ids for one in undisturbed]
        for one in done:
            assert 0 < one.speculation.num_accepted_tokens < one.speculation.num_draft_tokens
        for token, other in zip(done[4].tokens, undisturbed[4].tokens, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [v for _, v in token.top_logprobs] == pytest.approx(
                [v for _, v in other.top_logprobs], abs=1e-4
            )
        nodes = {place.node_id for place in group_runner(service).locations}
        assert len(nodes) == 1, "packed on one machine as long as it has room"
        stack.assert_idle_within(5.0)

    @pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
    def test_a_rank_lost_in_mid_generation_loses_and_doubles_no_token(
        self,
        started: tuple[LocalStack, boot.ModelService],
        undisturbed: list[Completion],
        rank: int,
        how: signal.Signals,
    ) -> None:
        """Killed, or stopped for ever: then only the limit of a step tells."""
        stack, service = started
        before = [place.pid for place in group_runner(service).locations]
        done: list[list[Completion]] = []
        generating = threading.Thread(target=lambda: done.append(generate_all(stack.address, NUM_TOKENS)))
        with Client(stack.address) as client:
            params = replace(PARAMS[0], max_tokens=NUM_TOKENS, ignore_eos=True)
            with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
                chunks = iter(stream)
                generating.start()
                next(chunks)
                os.kill(before[rank], how)
                for _ in chunks:
                    pass
                token_ids = list(stream.completion.token_ids)
        generating.join(START_S)
        assert token_ids == list(undisturbed[0].token_ids)
        assert [one.token_ids for one in done[0]] == [one.token_ids for one in undisturbed]
        after = [place.pid for place in group_runner(service).locations]
        assert not set(before) & set(after), "all ranks start again"
        stack.assert_idle_within(5.0)
        check_integrity(group_runner(service).pool)


OWN = ("heads", "layers", "mtp", "dflash", "eagle3")


@pytest.mark.slow
@pytest.mark.parametrize("source", OWN)
def test_what_a_target_drafts_with_says_on_two_ranks_what_it_says_on_one(
    cluster: Any, source: str, tmp_path: Path
) -> None:
    """The same texts, and chains, under every rule, of streams that draft together; embeddings and output
    layer are shared by the ranks. Then a rank is lost, and the texts are the same."""
    target, options = save_drafting(source, tmp_path)
    fixed = SamplingParams(max_tokens=48, ignore_eos=True, draft=source, num_draft_tokens=3, seed=7)
    requests = [
        replace(fixed, temperature=0),
        replace(fixed, rule=Rule.GUMBEL, temperature=0.5),
        replace(fixed, rule=Rule.REJECTION),
    ]
    if source not in ("layers", "mtp"):
        requests.append(replace(requests[1], num_draft_tokens=8, max_depth=3))
    found: list[list[Completion]] = []
    for num_ranks in (1, 2):
        shared = {"tensor_parallel_size": num_ranks, "num_threads": 1}
        with started_services() as services, local_stack(target, verify_options=options | shared) as stack:
            found.append(together(stack.address, [(params, PROMPT) for params in requests]))
            if num_ranks > 1:
                os.kill(group_runner(services["verify"]).locations[1].pid, signal.SIGKILL)
                found.append(together(stack.address, [(params, PROMPT) for params in requests]))
            stack.assert_idle_within(5.0)
            check_integrity(services["verify"].runner.pool)
    one, *others = ([each.token_ids for each in done] for done in found)
    assert others == [one, one]
    chains, same = ([each.speculation for each in done[:3]] for done in found[:2])
    for ours, expected in zip(same, chains, strict=True):
        assert ours.num_draft_tokens == expected.num_draft_tokens > 0
        assert ours.num_accepted_tokens == expected.num_accepted_tokens


@pytest.mark.slow
class TestFourRanks:
    def test_across_two_machines_the_logits_are_those_of_one_rank(self, cluster: Any, tmp_path: Path) -> None:
        target = save_target(tmp_path / "target", num_key_value_heads=4, tie_word_embeddings=True)
        config = VerifyConfig(
            model=str(target), dtype="float32", tensor_parallel_size=4, num_threads=1, num_kv_tokens=1024
        )
        runner = GroupRunner(config, str(target), "float32")
        try:
            assert len({place.node_id for place in runner.locations}) == 2
            assert len({place.pid for place in runner.locations}) == 4
            alone = ModelRunner(loading.load_model(target), num_pages=64)
            for found, expected in zip(_history(runner), _history(alone), strict=True):
                np.testing.assert_allclose(found, expected, atol=1e-4)
        finally:
            runner.close()


def _history(runner: Any) -> list[np.ndarray]:
    """Logits of two sequences that share a prefix, after a rollback, a fork, a copy on write, and a tree."""
    found = []
    with runner.new_sequence() as first, runner.new_sequence() as other:
        found.append(runner.run([Feed(first, PROMPT, 40), Feed(other, PROMPT[:9], 1)], 0, all_logits))
        first.truncate(21)
        with first.fork() as fork:
            feeds = [Feed(fork, [5, 6, 7], 3), Feed(first, PROMPT[21:30], 2), Feed(other, PROMPT[9:], 5)]
            found.append(runner.run(feeds, 0, all_logits))
        assert runner.run([Feed(first, [9], 0)], None, all_logits) is None
        found.append(runner.run([Feed(first, [8, 3], 2)], 0, all_logits))
        tree = TokenTree(first.length, (-1, -1, 0, 1, 2))
        found.append(runner.run([Feed(first, [4, 5, 6, 7, 8], 5, tree), Feed(other, [4])], 0, all_logits))
        first.keep(tree.start, [1, 3])
        found.append(runner.run([Feed(other, [9])], 0, all_logits))
        found.append(runner.run([Feed(first, [6])], 0, all_logits))
    return found


@pytest.mark.slow
def test_a_service_killed_takes_its_ranks_and_its_ray_instance_along(tmp_path: Path) -> None:
    """The instance is on loopback, and ends within seconds however the service does that started it."""
    target, _ = texts.save_pair(tmp_path)
    flags = ["--target", str(target), "--draft", "none", "--tensor-parallel-size", "2"]
    with running("up", *flags, "--address", "127.0.0.1:0") as up:
        address = up.ready_line().split()[1]
        with Client(address) as client:
            done = client.generate("The quick brown", SamplingParams(max_tokens=8, ignore_eos=True))
        assert done.usage.completion_tokens == 8
        verify = up.services["verify_service"]
        names = [child.name() for child in verify.children(recursive=True)]
        assert sum(name.startswith("ray::Rank") for name in names) == 2
        listening = {
            connection.laddr.ip
            for child in verify.children(recursive=True)
            for connection in child.net_connections("tcp")
            if connection.status == "LISTEN"
        }
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        own = verify.children(recursive=True)
        verify.kill()
        wait_until(lambda: all(map(gone, own)), END_S)
        up.process.terminate()
        assert up.ended() == 0
        up.assert_all_gone()


class TestWhatCannotStart:
    """One typed error that names rank, device and reason, or flag and value; never a hang."""

    @pytest.mark.slow
    def test_more_ranks_than_devices(self, cluster: Any, tmp_path: Path) -> None:
        target = save_target(tmp_path / "eight", num_attention_heads=8, num_key_value_heads=8, head_dim=4)
        config = VerifyConfig(model=str(target), tensor_parallel_size=8)
        with pytest.raises(ConfigError, match=r"--tensor-parallel-size 8: the Ray cluster has 4 CPUs"):
            boot.start(config, "verify", VerifyDecider())

    @pytest.mark.parametrize(
        ("family", "shape", "problem"),
        [
            ("gpt2", {}, "'gpt2' has no tensor parallel plan in transformers"),
            ("llama", {"num_key_value_heads": 1}, "num_key_value_heads=1 cannot be shared evenly by 2 ranks"),
            (
                "gpt_neox",
                {"num_attention_heads": 3, "hidden_size": 24},
                "num_attention_heads=3 cannot be shared",
            ),
        ],
    )
    def test_what_no_rank_could_load_is_refused_before_any_starts(
        self, tmp_path: Path, family: str, shape: dict[str, int], problem: str
    ) -> None:
        model = save_target(tmp_path / "model", family, **shape)
        with pytest.raises(ModelLoadError, match=re.escape(problem)):
            boot.start(VerifyConfig(model=str(model), tensor_parallel_size=2), "verify", VerifyDecider())

    def test_without_ray_the_error_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"^--tensor-parallel-size 2: needs Ray.*specwire\[ray\]"):
            boot.start(VerifyConfig(tensor_parallel_size=2), "verify", VerifyDecider())

    @pytest.mark.parametrize("config", [VerifyConfig, UpConfig])
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0: must be at least 1"),
            ({"ray_address": "auto"}, "--ray-address auto: is of use with"),
            ({"tensor_parallel_size": 2, "device": "cuda:1"}, "--device cuda:1: must be cpu or cuda"),
        ],
    )
    def test_flags(self, config: Any, options: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            config(**options)


#: Every family with a plan that is checked, and its shape.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "odd vocabulary": ("llama", {"vocab_size": 101}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    **{family: (family, {}) for family in ("qwen3", "mistral", "gemma2", "gemma3", "gpt_neox")},
}


class TestPlainRanks:
    """Plain processes, without Ray: one start for all of it."""

    @pytest.fixture(scope="class")
    @classmethod
    def sources(cls, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        root = tmp_path_factory.mktemp("families")
        return [save_target(root / name, family, **shape) for name, (family, shape) in SHAPES.items()]

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
        directory = tmp_path_factory.mktemp("large")
        large = rank_memory.save_model(directory, "bfloat16", num_layers=3, width=512, file_size="10MB")
        store = str(directory / "store")
        return run_ranks(2, _on_ranks, [str(source) for source in sources], str(large), store)

    @pytest.mark.slow
    def test_every_family_with_a_plan_computes_on_two_ranks_what_it_computes_on_one(
        self, sources: list[Path], found: tuple[Any, Any, Any]
    ) -> None:
        for name, source, (logits, description, _) in zip(SHAPES, sources, found[0], strict=True):
            model = loading.load_model(source)
            num_parameters = sum(weight.numel() for weight in model.parameters())
            assert description["num_parameters"] == num_parameters, name
            expected = rank_memory.logits_of(model, PROMPT)
            np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=name)

    @pytest.mark.slow
    def test_no_rank_holds_the_whole_model_while_it_loads(self, found: tuple[Any, Any, Any]) -> None:
        """Of float32 weights from several bfloat16 files, so that all of them must be converted."""
        for shard, whole in found[1]:
            assert whole.weights / 2 <= shard.weights < whole.weights * 0.51
            bound = shard.weights + rank_memory.BUFFER_BYTES
            assert shard.weights < shard.own <= bound
            assert whole.own > bound, "who holds it all is found out"

    @pytest.mark.slow
    def test_padded_steps_are_the_same_and_replayed_by_all_ranks_or_by_none(
        self, sources: list[Path], found: tuple[Any, Any, Any]
    ) -> None:
        """On a CPU, where nothing is recorded; NCCL in CUDA graphs has not been seen."""
        plain = _history(ModelRunner(loading.load_model(sources[0]), num_pages=64))
        together, apart = found[2]
        for logits, _, _ in (together, apart):
            for ours, expected in zip(logits, plain, strict=True):
                np.testing.assert_allclose(ours, expected, atol=1e-4)
        assert together[1] >= 5
        assert apart[1:] == (0, "rank 1: RuntimeError: no room")


def test_parts_are_added_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for numbers, expected in (((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)):
        parts = [torch.tensor(number) for number in numbers]
        monkeypatch.setattr(sharding, "_all_gathered", lambda part, parts=parts: parts)
        assert sharding.sum_in_rank_order(parts[0]).item() == expected


@pytest.mark.slow
def test_ranks_are_batch_invariant_where_their_parts_are_added_in_order(tmp_path: Path) -> None:
    """An all-reduce over four ranks adds the parts of a row in an order that depends on where it is, although
    all passes have one size: the check at start finds it. What transformers adds is refused by name."""
    llama, neox, phi3 = (
        str(save_target(tmp_path / family, family, **shape))
        for family, shape in (("llama", _FOUR_HEADS), ("gpt_neox", {}), ("phi3", _FOUR_HEADS))
    )
    cases = [(llama, True), (neox, True), (llama, False), (neox, False), (phi3, True)]
    *in_order, first, second, left = run_ranks(4, _refusals, cases)
    assert in_order == ["", ""]
    assert "--batch-invariant: a token's logits depend" in first
    assert "--batch-invariant: a token's logits depend" in second
    assert "o_proj.weight is spread over ranks by transformers" in left


_FOUR_HEADS = {"num_key_value_heads": 4}


def _refusals(num_ranks: int, cases: list[tuple[str, bool]]) -> list[str]:
    """Runs on each rank: why a model is refused, with sums in rank order or not; empty where it is not."""
    return [_refusal(num_ranks, source, in_rank_order=in_rank_order) for source, in_rank_order in cases]


def _refusal(num_ranks: int, source: str, *, in_rank_order: bool) -> str:
    from specwire.engine.group.sharding import load_shard

    try:
        model, _ = load_shard(source, dtype="bfloat16", num_ranks=num_ranks, in_rank_order=in_rank_order)
        ModelRunner(model, num_pages=64, batch_invariant=True).warm()
    except ModelLoadError as error:
        return str(error)
    return ""


class Broken:
    """A rank that cannot record."""

    def capture(self, run: Any) -> Any:
        raise RuntimeError("no room\nfor it")


def _on_ranks(num_ranks: int, sources: list[str], large: str, store: str) -> tuple[Any, Any, Any]:
    """Runs on each rank."""
    logits = rank_memory.logits_on_ranks(num_ranks, sources, PROMPT)
    with mock.patch.object(packing, "_is_mkl_slow", return_value=True):  # where others keep packed copies
        loaded = rank_memory.loaded_on_ranks(num_ranks, large)
    return logits, loaded, _replayed_on_ranks(num_ranks, sources[0], store)


def _replayed_on_ranks(num_ranks: int, source: str, store: str) -> list[tuple[Any, int, str]]:
    """Logits with padded steps, how many of them are replayed, and why not."""
    from specwire.engine.group.sharding import load_shard

    untyped: Any = dist
    rank, found = dist.get_rank(), []
    for name, ours in (("all record", EagerReplay()), ("one cannot", Broken() if rank else EagerReplay())):
        model, _ = load_shard(source, dtype="auto", num_ranks=num_ranks)
        part = untyped.PrefixStore(name, untyped.FileStore(store, num_ranks))
        replay = AgreedReplay(ours, part, rank, num_ranks)
        runner = ModelRunner(model, num_pages=64, replay=replay)
        replay.warm(runner)
        found.append((_history(runner), runner.num_graphs, replay.problem))
    return found
