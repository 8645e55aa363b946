"""Which node of a cluster a process goes to, what it reserves, and what a node may not lack."""

from __future__ import annotations

import copy
import itertools
import json
import platform
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from skyrl_trainer import cli
from skyrl_trainer.config import load_config
from skyrl_trainer.dry_run.doctor import hardware
from skyrl_trainer.dry_run.plan import obstacles
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.elastic import spread
from skyrl_trainer.run.cluster import Found, Node, check_here, cores_each, differences, look, place_engines, shortage
from skyrl_trainer.run.model_shape import model_shape
from skyrl_trainer.run.processes import Processes, check_engines, start_ray
from skyrl_trainer.settings import Config
from tests.trainer.fakes import tiny_policy, tiny_tokenizer

MIB = 2**20
EVEN = {"driver": 4.0, "b": 4.0, "c": 4.0}


@pytest.mark.parametrize(
    ("where", "cores", "spread_out"),
    [
        ([""], EVEN, ["c"]),  # the driver's node comes last
        ([""] * 3, EVEN, ["c", "b", "driver"]),
        ([""] * 3, {"driver": 2.0, "b": 8.0}, ["b", "b", "b"]),  # in proportion to the cores
        ([""] * 5, {"driver": 2.0, "b": 8.0}, ["b", "b", "b", "b", "driver"]),
        ([""] * 2, {"head": 0.0, "b": 4.0}, ["b", "b"]),  # `ray start --head --num-cpus=0`
        (["b", "c", "driver"], EVEN, ["b", "c", "driver"]),  # nothing to mend
        (["x", "c", "driver"], EVEN, ["b", "c", "driver"]),  # x has died: only its worker moves
        (["b", "b", "b"], EVEN | {"new": 4.0}, ["new", "c", "b"]),  # nodes have joined
        (["b", "b"], {"b": 1.0, "new": 1.0}, ["new", "b"]),
    ],
)
def test_workers_are_spread_over_the_nodes(where: list[str], cores: dict[str, float], spread_out: list[str]) -> None:
    assert spread(where, cores) == spread_out


@given(
    st.lists(st.sampled_from("abcdx"), max_size=12),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.0, 1.0, 2.0, 64.0]), min_size=1),
)
def test_spreading_ends_and_is_final(where: list[str], cores: dict[str, float]) -> None:
    placed = spread(where, cores)
    assert len(placed) == len(where) and set(placed) <= set(cores)
    assert spread(placed, cores) == placed, "nobody moves twice"
    for crowded, other in itertools.permutations(cores, 2):
        if cores[crowded] and cores[other]:
            assert placed.count(crowded) / cores[crowded] <= (placed.count(other) + 1) / cores[other] + 1e-9


@pytest.mark.parametrize(
    ("cpus", "engines", "env_workers", "cores"),
    [
        ([4], 1, 2, 0.0),  # one machine: as ever
        ([1, 1], 2, 1, 0.0),
        ([2, 2, 2, 2], 4, 4, 0.5),
        ([100] * 8, 64, 32, 1.0),
        ([100, 4], 1, 4, 0.7),  # the large one may die
    ],
)
def test_what_an_env_worker_reserves_can_be_had_once_the_largest_node_has_died(
    cpus: list[int], engines: int, env_workers: int, cores: float
) -> None:
    assert cores_each([Node(str(i), each, 0) for i, each in enumerate(cpus)], engines, env_workers) == cores


def test_a_cluster_that_is_too_small_is_said_node_by_node() -> None:
    nodes = [Node("a", 2, 0, 4, "head (aaaa)"), Node("b", 1.5, 0, 8, "10.0.0.2 (bbbb)")]
    config = Config.model_validate({"generator": {"num_inference_engines": 4}})
    with pytest.raises(UserError, match=r"room for 3 of 4 .*\(2 on head \(aaaa\), 1 on 10\.0\.0\.2 \(bbbb\)\)"):
        place_engines(config, nodes, on_gpus=False)


MISSING = {"missing": ["/shared/policy/config.json"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"python": "3.9.1"}, r"node b1 has Python 3\.9\.1, and the driver 3\.\d+\.\d+: install the same"),
        ({"packages": {"ray": "1.0"}}, r"node b1 has ray 1\.0, and the driver \d.*: install the same"),
        (MISSING, r"node b1 does not see /shared/policy: put it into a folder that all machines share"),
    ],
)
def test_a_node_that_cannot_take_part_is_named(change: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    ours = look([str(tmp_path)])
    absent = str(tmp_path / "none")
    assert not ours.missing and look([absent]).missing == [absent] and ours.memory > 0
    changed = ours._replace(**{**change, "packages": ours.packages | change.get("packages", {})})
    found = list(differences("node b1", Found(*changed), ours))
    if said is None:
        assert not found
    else:
        [sentence] = found
        assert re.fullmatch(said, sentence), sentence


@pytest.mark.parametrize(
    ("shared", "temporary", "store", "needs", "by_tmpdir"),
    [
        (210, 0, 0, "", False),
        (209, 209, 0, "209 for the weights and 0", True),
        (209, 210, 0, "", False),  # too small a /dev/shm: the buffer goes to the temporary folder
        (300, 9000, 256, "209 for the weights and 256", False),  # the buffer would leave the store 90
        (466, 0, 256, "", False),
        (64, 9000, 200, "209 for the weights and 200", False),  # no room for a store that lies there
        (0, 0, 0, "209 for the weights and 0", True),
    ],
)
def test_a_full_dev_shm_is_said_with_what_is_needed_and_what_is_free(
    shared: int, temporary: int, store: int, needs: str, by_tmpdir: bool
) -> None:
    found = look([])._replace(shared_memory=shared * MIB, temporary=temporary * MIB)
    said = shortage("node b1", found, 200 * MIB - MIB // 2, store * MIB)
    if not needs:
        assert not said
        return
    [sentence] = said
    has = f"node b1 has {shared} MiB free in /dev/shm and {temporary:,} in its temporary folder"
    way = "free some, enlarge /dev/shm (docker run --shm-size)" + ", or set TMPDIR to a folder with room" * by_tmpdir
    assert sentence == f"{has}, and needs {needs} of /dev/shm for Ray's object store: {way}"


def test_a_run_on_one_machine_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is measured is small; what is needed and how they compare is the run's."""
    policy, folder = tmp_path / "policy", tmp_path / "run"
    tiny_policy(policy)
    settings = [f"trainer.policy.model.path={policy}", f"trainer.run_dir={folder}"]
    config = load_config("quickstart", settings)
    check_here(config)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=1000))
    said = f"This machine ({platform.node()}) has 0 MiB free in /dev/shm and 0 in its temporary folder"
    assert [each for each in obstacles(config, hardware()) if each.startswith(said)]
    assert cli.main(["train", "quickstart", *settings]) == 2
    assert said in capsys.readouterr().err and not folder.exists()
    with pytest.raises(UserError, match=re.escape(said)):  # as the Python API finds it
        check_engines(config, str(policy), training=True)
    check_engines(config, str(policy), training=False)  # no weights travel


def test_a_policy_that_cannot_talk_is_refused_before_ray_starts(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no chat template"), Processes(load_config(None, []), str(tmp_path)):
        pass
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer of .* cannot be loaded"), Processes(Config(), str(tmp_path)):
        pass


def test_a_port_of_rays_head_that_another_program_has_is_said_at_once() -> None:
    """Ray itself would go on asking for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def answer() -> None:
            with other.accept()[0] as client:
                client.recv(100)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        said = f"Could not join the Ray cluster at {address}: another program has that port.*Check ray.address"
        with pytest.raises(UserError, match=said):
            start_ray(Config.model_validate({"ray": {"address": address}}))
        thread.join(10)


@pytest.mark.parametrize("command", ["train", "serve"])
def test_a_port_that_is_taken_is_said_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, folder = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        train = ["train", "quickstart", f"--serve={port}", f"trainer.run_dir={folder}"]
        assert cli.main(train if command == "train" else ["serve", policy, f"--port={port}"]) == 2
    said = capsys.readouterr().err
    assert f"Nobody can listen on 127.0.0.1:{port} (" in said and said.endswith("port 0 takes a free one.\n"), said
    assert not folder.exists() and not ray.is_initialized()


def test_the_first_process_of_a_container_has_no_parent_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getppid", lambda: 0)
    assert look([]).store_shares is False


def test_engines_on_gpus_need_cores_too() -> None:
    nodes = [Node("a", 0, 8, 8, "head (aaaa)"), Node("b", 2, 8, 8, "other (bbbb)")]
    two = Config.model_validate({"generator": {"num_inference_engines": 2}, "trainer": {"placement": {}}})
    assert place_engines(two, nodes, on_gpus=True) == ["b", "b"]


def test_a_ray_client_is_refused() -> None:
    with pytest.raises(UserError, match="a Ray client cannot place engines: give HOST:PORT"):
        start_ray(Config.model_validate({"ray": {"address": "ray://head:10001"}}))


@pytest.mark.parametrize("text", ["[]", '{"num_attention_heads": null}', '{"num_attention_heads": 0}'])
def test_a_models_file_that_describes_none_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    filled = text.replace("{", '{"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9, ')
    (tmp_path / "config.json").write_text(filled)
    config = Config.model_validate({"trainer": {"policy": {"model": {"path": str(tmp_path)}}}})
    with pytest.raises(UserError, match=r"trainer\.policy\.model\.path: .*config\.json is not a model's"):
        model_shape(config)


def test_a_mixture_of_experts_is_not_weighed_as_if_it_were_dense(tmp_path: Path) -> None:
    dense = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = Config.model_validate({"trainer": {"policy": {"model": {"path": str(tmp_path)}}}})
    for more, known in (({}, True), ({"num_experts": 8}, False)):
        (tmp_path / "config.json").write_text(json.dumps(dense | {"vocab_size": 9} | more))
        assert (model_shape(config) is not None) == known
