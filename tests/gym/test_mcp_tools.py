"""MCP servers as tools: what they do wrong costs a call or an episode, nothing of theirs is left, replay needs none."""

import contextlib
import copy
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import pytest

import skyrl_gym
from skyrl_gym.adapters.trl import environment_factory
from skyrl_gym.envs.tool_use.env import ToolUseEnv
from skyrl_gym.openenv.episode import Episode
from skyrl_gym.parsing import ToolCall
from skyrl_gym.tools.mcp import McpServer
from skyrl_gym.tools.tool import run_call
from tests.gym.mcp_servers import OFFICIAL, PLAIN

ID = "skyrl/tool_use-v0"
ROW = {"task": {"prompt": "What is 2 + 3?", "ground_truth": "5"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    (folder / "official.py").write_text(OFFICIAL)
    (folder / "plain.py").write_text(PLAIN)
    return folder


@pytest.fixture
def token():
    """In the environment of all that a server starts, so that it can be found; none of it may be left."""
    token = uuid.uuid4().hex
    yield token
    wait_for_none(token)


@pytest.fixture
def plain(folder, token):
    def settings(how="well", **more):
        command = [sys.executable, "-I", "-S", str(folder / "plain.py"), how]
        return {"mcp": {"command": command, "env": {"TOKEN": token}, **more}}

    return settings


@pytest.fixture(scope="module")
def url(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(folder / "official.py"), str(port)])
    try:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 60, "the HTTP server")
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


def wait_until(true, seconds, what):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def processes(token):
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token.encode() in place.read_bytes():
                found.append(int(place.parent.name))
    return found


def wait_for_none(token):
    wait_until(lambda: not processes(token), 30, "the end of a server's processes")


def calls(*given):
    return "".join(f"<tool_call>{json.dumps({'tool': tool, 'args': args})}</tool_call>" for tool, args in given)


def played(env, *actions):
    """Observations and calls of an episode that ends with its answer."""
    heard = [env.reset(seed=1, options=ROW)[0]]
    for action in actions:
        observation, _, _, _, info = env.step(action)
        heard += [observation, info["tool_calls"]]
    _, reward, terminated, _, _ = env.step("<answer>5</answer>")
    assert terminated and reward >= 1
    return heard


@pytest.mark.parametrize("waits", [False, True])
def test_a_kind_of_ones_own_says_itself_whether_it_waits(waits):
    class Own(ToolUseEnv):
        metadata = ToolUseEnv.metadata | {"waits": waits}

    assert Own().metadata["waits"] is waits


def test_an_official_server_over_stdio(folder, token):
    command = [sys.executable, str(folder / "official.py")]
    env = gym.make(ID, tools=["calculator", {"mcp": {"command": command, "env": {"TOKEN": token}, "seconds": 100}}])
    _, info = env.reset(options=ROW)
    assert [each["function"]["name"] for each in info["tools"]] == ["calculator", "add", "refuse", "grow", "repeat"]
    assert "Adds two whole numbers." in info["instructions"] and env.unwrapped.metadata["waits"]
    action = calls(
        ("add", {"x": 2, "y": 3}), ("add", {"x": "two"}), ("add", {"y": 1}), ("calculator", {"expression": "2+3"})
    )
    observation, _, _, _, info = env.step(action)
    assert [call.get("result") for call in info["tool_calls"]] == ["5", None, None, "5"]
    assert info["tool_calls"][1]["args"] is None and not info["valid_action"]
    assert "add: argument.x: 'two' is not of type 'integer'" in observation and "'x' is a required" in observation
    observation, *_, info = env.step(calls(("refuse", {"why": "no luck today"})))
    assert info["valid_action"] and "no luck today" in observation and processes(token)
    env.step(calls(("grow", {})))
    assert "Error" in env.step(calls(("refuse", {"why": "?"})))[0]  # it is gone: an answer, and the episode goes on
    _, reward, terminated, *_ = env.step("<answer>5</answer>")
    assert terminated and reward > 1
    wait_for_none(token)  # without a close


def test_its_tools_are_told_before_the_first_reset(plain, token):
    """By OpenEnv's list, by TRL's methods, and to whoever asks; the session ends with the environment."""
    with_tools = gym.make(ID, tools=[plain()])
    names = [each["function"]["name"] for each in with_tools.reset(options=ROW)[1]["tools"]]
    with_tools.close()
    env = gym.make(ID, tools=[plain()])
    assert [each["function"]["name"] for each in env.unwrapped.tools] == names and names
    env.close()
    made = environment_factory("tool_use", tools=[plain()])
    assert {each for each in names if hasattr(made, each)} == {*names}
    gym.register("skyrl/with_mcp-v0", "skyrl_gym.envs.tool_use.env:ToolUseEnv", kwargs={"tools": [plain()]})
    try:
        episode = Episode("skyrl/with_mcp-v0")
        assert [each["name"] for each in episode.tools] == [*names, "act"]
        episode.close()
    finally:
        del gym.registry["skyrl/with_mcp-v0"]


def test_many_episodes_over_http_and_a_list_that_changes(url):
    def episode(number):
        with contextlib.closing(gym.make(ID, tools=[{"mcp": {"url": url, "seconds": 100}}])) as env:
            return played(env, calls(("add", {"x": number, "y": number})))[2][0]["result"]

    count = 20
    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(episode, range(count))) == [str(2 * number) for number in range(count)]
    env = gym.make(ID, tools=[{"mcp": {"url": url, "seconds": 100}}])
    names = [[each["function"]["name"] for each in env.reset(options=ROW)[1]["tools"]]]
    env.step(calls(("grow", {})))
    names.append([each["function"]["name"] for each in env.reset(options=ROW)[1]["tools"]])
    assert names == [["add", "refuse", "grow", "repeat"], ["add", "grow", "repeat", "grown"]]
    env.close()


def test_what_an_http_server_may_send_is_bounded(url, monkeypatch):
    monkeypatch.setattr("skyrl_gym.tools.mcp_session.MOST_BYTES", 100_000)
    env = gym.make(ID, tools=[{"mcp": {"url": url, "seconds": 30}}])
    env.reset(options=ROW)
    assert "[... 16000 characters left out ...]" in env.step(calls(("repeat", {"times": 20_000})))[0]
    assert "Error: The MCP server failed: " in env.step(calls(("repeat", {"times": 60_000})))[0]
    env.reset(options=ROW)
    assert "xx" in env.step(calls(("repeat", {"times": 2})))[0]
    env.close()


def test_an_http_server_that_is_not_there():
    env = gym.make(ID, tools=[{"mcp": {"url": "http://127.0.0.1:9/mcp"}}])
    with pytest.raises(RuntimeError, match=r"No list of tools from the MCP server http://127.0.0.1:9/mcp: .*onnect"):
        env.reset(options=ROW)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.full)])
def test_many_episodes_at_once_each_with_a_server(plain, token, count):
    def episode(number):
        env = gym.make(ID, tools=[plain(seconds=200)])
        asked = env.reset(options=ROW)[0], env.step(calls(("double", {"x": number})))[0]
        env.close()
        return asked[1]

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(episode, range(count)))
    assert answers == [f"<tool_response>\n{2 * number}\n</tool_response>" for number in range(count)]
    wait_for_none(token)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("ends", "failed: .*losed"),
        ("silent", "did not answer within 2 s"),
        ("lies", "SchemaError: 'thing' is not valid"),
    ],
)
def test_a_server_without_a_list_of_tools_costs_the_episode(plain, token, how, sentence):
    env = gym.make(ID, tools=[plain(how, seconds=2 if how == "silent" else 60)])
    with pytest.raises(RuntimeError, match=f"No list of tools from the MCP server .*{sentence}"):
        env.reset(options=ROW)
    env.close()


@pytest.mark.parametrize("how", ["dies", "hangs", "garbage", "huge"])
def test_a_server_that_fails_costs_the_call(plain, token, how):
    seconds = 8 if how == "hangs" else 100  # the others end their session themselves, or by what they send
    env, well = gym.make(ID, tools=[plain(how, seconds=seconds)]), gym.make(ID, tools=[plain()])
    well.reset(options=ROW)
    env.reset(options=ROW)
    for _ in range(1 if how == "hangs" else 2):  # it is not started again in this episode
        _, _, terminated, _, info = env.step(calls(("double", {"x": 1})))
        assert info["valid_action"] and not terminated
        sentence = "The MCP server did not answer within 8 s." if how == "hangs" else "The MCP server failed: "
        assert info["tool_calls"][0]["error"].startswith(sentence)
    assert "2" in well.step(calls(("double", {"x": 1})))[0]  # nobody else notices
    assert env.step("<answer>5</answer>")[1] > 1
    well.close()


def test_what_a_server_prints_beside_its_messages_is_left_out(plain):
    assert "84" in played(gym.make(ID, tools=[plain("talks")]), calls(("double", {"x": 42})))[1]


def test_patterns_are_left_to_the_server_and_numbers_are_those_of_json(plain):
    server = McpServer(plain()["mcp"])
    tools = {tool.name: tool for tool in server.tools()}
    assert run_call(tools, ToolCall("double", {"x": 1, "word": "é"}))["result"] == "2"  # \p is not Python's
    assert run_call(tools, ToolCall("double", {"x": float("nan")}))["args"] is None
    assert "unexpected" in run_call(tools, ToolCall("double", {"self": 1}))["error"]
    server.close()


@pytest.mark.parametrize("end", ["close", "reset", "forgotten", "truncated"])
def test_nothing_is_left_of_a_server_that_clings(plain, token, end):
    """It ignores SIGTERM and the end of its input, and has a child in a session of its own."""
    env = gym.make(ID, tools=[plain("clings")], max_episode_steps=1)
    env.reset(options=ROW)
    first = set(processes(token))
    assert len(first) == 3
    if end == "reset":
        env.reset(options=ROW)
        wait_until(lambda: not first & set(processes(token)), 30, "the first session's end")
    if end == "truncated":
        assert env.step("What?")[3]
    if end != "forgotten":
        env.close()
    del env
    wait_for_none(token)


def test_nothing_is_left_when_the_environments_process_is_killed(plain, token):
    code = f"""
import gymnasium, skyrl_gym, time
env = gymnasium.make("{ID}", tools=[{plain("clings")!r}])
env.reset(options={ROW!r})
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "ready\n" and len(processes(token)) == 3
        os.kill(owner.pid, signal.SIGKILL)
        wait_for_none(token)


@pytest.mark.full
def test_two_hundred_episodes_of_an_env_worker(plain, token, tmp_path):
    """As runs have them: the calls wait in threads of one process; half end, and then the process is killed."""
    from skyrl_trainer.rollout.env_worker import EnvWorker
    from skyrl_trainer.types import Sample

    file, keys = tmp_path / "envs.py", [str(number) for number in range(200)]
    arguments = (
        f"'mine/clinging-v0', 'skyrl_gym.envs.tool_use.env:ToolUseEnv', kwargs={{'tools': [{plain('clings')!r}]}}"
    )
    file.write_text(f"import gymnasium\n\ngymnasium.register({arguments})\n")
    sample, worker = Sample("s", "mine/clinging-v0", 1, ROW, None, str(file)), EnvWorker(60.0)

    def answers(what, keys, arguments):
        worker.call_many([(what, key, argument) for key, argument in zip(keys, arguments, strict=True)])
        heard = {}
        while missing := [key for key in keys if key not in heard]:
            [reply] = worker.call_many([("ended", "", missing)])
            heard |= reply.info
            time.sleep(0.02)
        return [heard[key][0] for key in keys]

    assert not any("error" in reply for reply in answers("reset", keys, [sample] * len(keys)))
    assert len(processes(token)) == 3 * len(keys)
    doubled = answers("step", keys, [calls(("double", {"x": int(key)})) for key in keys])
    assert [reply["observation"].split()[1] for reply in doubled] == [str(2 * int(key)) for key in keys]
    assert all(reply["terminated"] for reply in answers("step", keys[:100], ["<answer>5</answer>"] * 100))
    wait_until(lambda: len(processes(token)) == 3 * 100, 30, "the end of half of them")
    worker.shutdown()


def test_a_replay_needs_no_server(plain, tmp_path):
    listed = str(tmp_path / "tools.json")
    actions = [calls(("double", {"x": 4}), ("double", {"x": 5})), "What?", calls(("double", {"x": "no"}))]
    recorded = played(gym.make(ID, tools=[plain(tools=listed)]), *actions)
    nowhere = {"mcp": {"command": [str(tmp_path / "no-server")], "tools": listed}}
    env = gym.make(ID, tools=[nowhere])
    heard = [env.reset(seed=1, options=ROW)[0]]
    for action, made in zip(actions, recorded[2::2], strict=True):
        env.unwrapped.feed_external(made)
        observation, *_, info = env.step(action)
        heard += [observation, info["tool_calls"]]
    assert heard == recorded
    assert "there is no program" in env.step(calls(("double", {"x": 4})))[0]  # and so it was none that answered


def test_the_file_of_tools_pins_the_prompt(folder, plain, tmp_path):
    listed = tmp_path / "tools.json"
    first = gym.make(ID, tools=[plain(tools=str(listed))]).reset(options=ROW)[1]
    assert json.loads(listed.read_text())[0]["name"] == "double" and list(tmp_path.iterdir()) == [listed]
    again = gym.make(ID, tools=[{"mcp": {"url": "http://127.0.0.1:9/mcp", "tools": str(listed)}}])
    assert again.reset(options=ROW)[1] == first
    for wrong in ('[{"name": "x"}]', "[]", '["x"]', "{"):
        listed.write_text(wrong)
        with pytest.raises(RuntimeError, match=f"No list of tools from {listed}: "):
            again.reset(options=ROW)


def test_copies_have_sessions_of_their_own(plain, token):
    env = gym.make(ID, tools=["calculator", plain()])
    env.reset(options=ROW)
    own = set(processes(token))
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert twin.step(calls(("double", {"x": 4})))[0] == env.step(calls(("double", {"x": 4})))[0]
        assert own < set(processes(token))
        twin.close()
        wait_until(lambda: set(processes(token)) == own, 30, "the end of the copy's session alone")
    fresh = gym.make(ID, tools=["calculator", plain()])
    fresh.unwrapped.set_state(json.loads(json.dumps(env.unwrapped.get_state())))
    assert "8" in fresh.unwrapped.step(calls(("double", {"x": 4})))[0]
    fresh.close()
    env.close()


@pytest.mark.usefixtures("clean_registry")
def test_a_registry_file_may_name_a_server(plain, tmp_path):
    entry = {"id": "mine/with_mcp-v0", "entry_point": "skyrl_gym.envs.tool_use.env:ToolUseEnv", "description": "d"}
    file = tmp_path / "envs.yaml"
    file.write_text(json.dumps({"schema": 1, "envs": [entry | {"kwargs": {"tools": ["wiki", plain()]}}]}))
    skyrl_gym.load_registry(file)
    assert "10" in played(gym.make("mine/with_mcp-v0"), calls(("double", {"x": 5})))[1]


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        ({"mpc": {}}, r"A tool that has mpc is not {mcp: {command: \[PROGRAM"),
        ({"mcp": "python server.py"}, "A tool that has mcp is not {mcp: {"),
        ({"python_exec": {}}, "A tool that has python_exec is not {mcp: {"),
        ({1: 2}, "A tool that has 1 is not {mcp: {"),
        ({"python_exec": 5}, "A tool that has python_exec is not {mcp: {"),
        ({"python_exec": {"wall": 5}}, "python_exec has no limit 'wall'; valid ones are wall_seconds, cpu_seconds, "),
        ({"python_exec": {"memory_mib": 8}}, r"python_exec needs more than Limits\(.*memory_mib=8.*no code can run: "),
        ({"python_exec": {"wall_seconds": 0}}, "wall_seconds is 0; expected a positive"),
        ({"mcp": {"command": "python server.py"}}, "MCP server: command cannot be; expected is command: "),
        ({"mcp": {"command": ["a"], "url": "http://a"}}, "command and url cannot be"),
        (
            {"mcp": {"command": ["a"], "timeout": 3}},
            "timeout cannot be; expected is .*; tools: FILE, seconds",
        ),
        ({"mcp": {"command": ["a"], "seconds": -3}}, "seconds cannot be"),
        ({"mcp": {"command": ["a"], "env": {"KEY": 7}}}, "env cannot be"),
    ],
)
def test_wrong_settings_are_a_sentence(tool, sentence):
    with pytest.raises(ValueError, match=sentence):
        gym.make(ID, tools=[tool])


def test_without_the_package_there_is_a_sentence_and_no_secret_is_told(plain):
    make = f"gymnasium.make('skyrl_gym:{ID}', tools=[{plain()}])"
    code = f"import sys; sys.modules['mcp'] = None; import gymnasium; {make}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "MCP servers need the package mcp: pip install 'skyrl-gym[mcp]'." in done.stderr
    for wrong in ({"env": {"KEY": "secret"}}, {"url": "http://127.0.0.1:9", "env": {"KEY": "secret"}, "tools": 7}):
        with pytest.raises(ValueError, match="MCP server: ") as told:
            McpServer(wrong)
        assert "secret" not in str(told.value)


def test_two_tools_of_one_name_are_refused(plain):
    env = gym.make(ID, tools=[plain(), plain()])
    with pytest.raises(ValueError, match="Two tools are called 'double'"):
        env.reset(options=ROW)
    env.close()
