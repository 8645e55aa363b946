"""OpenEnv both ways: our environments behind our server, and servers that others write behind our environment."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import gymnasium as gym
import pytest
import yaml
from websockets.asyncio.client import connect as connect_async
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response
from websockets.sync.client import connect
from websockets.sync.server import serve as serve_websockets

import skyrl_gym
from skyrl_gym.__main__ import main
from skyrl_gym.openenv.server import Limits, Server, prepared
from skyrl_trainer.data import load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.env_worker import EnvReply, EnvWorker
from tests.gym.test_all_envs import FULL, IDS, ROWS, bad_actions, good_action, varied


@contextmanager
def served(env_id: str = "skyrl/text_math-v0", key: str | None = None, **limits: float) -> Iterator[str]:
    """Our server in a thread; its address."""
    server, listening = prepared(env_id, "127.0.0.1", 0, key, Limits(**limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
        assert not thread.is_alive()


def plain(result: tuple) -> list:
    """As JSON has it."""
    return json.loads(json.dumps(result))


def post(url: str, path: str, body: object, key: str = "") -> dict:
    headers = {"Authorization": f"Bearer {key}"}
    with urlopen(Request(url.replace("ws", "http", 1) + path, json.dumps(body).encode(), headers), timeout=20) as reply:
        return json.load(reply)


def get(url: str, path: str) -> dict:
    with urlopen(url.replace("ws", "http", 1) + path, timeout=20) as reply:
        return json.load(reply)


def say(connection, message: object) -> dict:
    """Sends a message, or a text as it is, and reads the reply."""
    connection.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return json.loads(connection.recv(timeout=20))


def reset(**options: object) -> dict:
    return {"type": "reset", "data": options}


def step(text: str) -> dict:
    return {"type": "step", "data": {"text": text}}


# Our environments behind our server.


@pytest.mark.parametrize("env_id", IDS)
def test_trajectories_are_those_of_the_environment_itself(env_id):
    own = gym.make(env_id)
    with served(env_id) as url, gym.make("skyrl/openenv-v0", url=url) as far:
        for seed in range(12 if FULL else 4):
            options = varied(own, dict(ROWS.get(env_id, {})), seed)
            assert plain(far.reset(seed=seed, options=options)) == plain(own.reset(seed=seed, options=options))
            junk = bad_actions(random.Random(seed), good_action(own))
            over = False
            for _ in range(12):
                action = good_action(own) if seed % 2 else next(junk)
                expected = own.step(action)
                assert plain(far.step(action)) == plain(expected)
                over = expected[2] or expected[3]
                if over:
                    break


def test_the_step_limit_truncates_there_as_here():
    own = gym.make("skyrl/code_lite-v0")
    with served("skyrl/code_lite-v0") as url, gym.make("skyrl/openenv-v0", url=url) as far:
        assert plain(far.reset(seed=1)) == plain(own.reset(seed=1))
        results = [(plain(far.step("")), plain(own.step(""))) for _ in range(4)]
    assert [far for far, _ in results] == [own for _, own in results]
    assert [far[2:4] for far, _ in results] == [[False, False]] * 3 + [[False, True]]


def test_256_sessions_at_once_each_with_a_task_of_its_own():
    own = gym.make("skyrl/webshop_lite-v0")

    async def play(url: str, number: int, here: asyncio.Barrier) -> list:
        async with connect_async(f"{url}/ws", proxy=None, open_timeout=60) as connection:

            async def ask(message: dict) -> dict:
                await connection.send(json.dumps(message))
                return json.loads(await connection.recv())["data"]

            said = [await ask(reset(split="val", task_id=number))]
            async with asyncio.timeout(120):
                await here.wait()  # all 256 episodes have begun
            return [*said, *[await ask(step(action)) for action in ("search[red]", "click[next >]", "nonsense")]]

    async def everybody(url: str) -> list[list]:
        here = asyncio.Barrier(256)
        return await asyncio.gather(*(play(url, number, here) for number in range(256)))

    with served("skyrl/webshop_lite-v0", sessions=256) as url:
        found = asyncio.run(everybody(url))
    assert len({said[0]["observation"]["metadata"]["task_id"] for said in found}) == 256
    for number in range(0, 256, 16):
        text, info = own.reset(options={"task_id": f"val:1:en:{number}"})
        seen = [{"text": text, "metadata": info}]
        seen += [dict(zip(("text", "metadata"), own.step(action)[::4], strict=True)) for action in ("search[red]",)]
        assert [said["observation"] for said in found[number][:2]] == plain(seen)


def test_too_many_sessions_are_refused_until_one_ends():
    with served(sessions=2) as url, connect(f"{url}/ws") as first, connect(f"{url}/ws") as second:
        say(first, reset()), say(second, reset())
        with connect(f"{url}/ws") as third:
            refusal = json.loads(third.recv(timeout=20))
            assert refusal["data"]["code"] == "CAPACITY_REACHED" and "2 sessions at once" in refusal["data"]["message"]
        with gym.make("skyrl/openenv-v0", url=url) as far, pytest.raises(ConnectionError, match="2 sessions at once"):
            far.reset()
        with pytest.raises(HTTPError) as failed:
            post(url, "/reset", {})
        assert failed.value.code == HTTPStatus.SERVICE_UNAVAILABLE
        first.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            first.recv(timeout=20)
        for seed in range(5):  # each gives its place back
            with gym.make("skyrl/openenv-v0", url=url) as far:
                assert far.reset(seed=seed)[0] == gym.make("skyrl/text_math-v0").reset(seed=seed)[0]


def test_idle_sessions_end_with_a_sentence():
    with served(idle=1.5, sessions=1) as url, connect(f"{url}/ws") as connection:
        say(connection, reset())
        time.sleep(2.5)
        refusal = say(connection, step("1"))["data"]
        assert refusal["code"] == "SESSION_ERROR" and "idle for 1.5 s" in refusal["message"]
        with connect(f"{url}/ws") as another:
            assert say(another, reset())["type"] == "observation"
            assert say(connection, reset())["data"]["code"] == "CAPACITY_REACHED"
        time.sleep(0.5)
        assert say(connection, reset())["type"] == "observation"  # the same connection goes on


def test_a_session_that_is_played_does_not_become_idle():
    async def played() -> None:
        server = Server("skyrl/text_math-v0", Limits(idle=600.0))
        server._begin("mine")
        first = server._open["mine"].end
        await server._call("mine", "reset", {"seed": 1})
        later = server._open["mine"].end
        assert first.cancelled() and not later.cancelled() and later.when() > first.when()
        server._end("mine")

    asyncio.run(played())


BAD = [
    ("not json", "INVALID_JSON", "JSON object"),
    (b"\xff\xfe", "INVALID_JSON", "JSON object"),
    ("[" * 100_000, "INVALID_JSON", "recursion"),
    ("[]", "VALIDATION_ERROR", "not list"),
    ({"type": "dance"}, "UNKNOWN_TYPE", "'dance'"),
    ({"type": "reset", "data": [1]}, "VALIDATION_ERROR", "not list"),
    (reset(seed=-1), "VALIDATION_ERROR", "seed is -1"),
    (reset(seed="1"), "VALIDATION_ERROR", "seed is '1'"),
    (reset(task_id="val:9"), "VALIDATION_ERROR", "task_id 'val:9' is not"),
    (reset(task_id=10**9), "VALIDATION_ERROR", "task_id"),
    (reset(split="dev"), "VALIDATION_ERROR", "valid values are 'train', 'val', 'test'"),
    (reset(size=3), "VALIDATION_ERROR", "no option 'size'"),
    ({"type": "step", "data": {"answer": "1"}}, "VALIDATION_ERROR", "An action is"),
    ({"type": "step", "data": {"text": 1}}, "VALIDATION_ERROR", "An action is"),
    ({"type": "step", "data": {"type": "call_tool", "tool_name": ["x"]}}, "VALIDATION_ERROR", "tools act"),
]


def test_whatever_is_wrong_with_a_message_is_a_sentence_and_the_session_goes_on():
    with served() as url, connect(f"{url}/ws") as connection:
        before = say(connection, step("1"))["data"]
        assert before["code"] == "VALIDATION_ERROR" and "reset" in before["message"]
        begun = say(connection, reset(seed=5))
        for message, code, words in BAD:
            refusal = say(connection, message)
            assert refusal["type"] == "error" and refusal["data"]["code"] == code, message
            assert words in refusal["data"]["message"]
        assert say(connection, reset(seed=5)) == begun
        assert say(connection, step("\\boxed{1}"))["data"]["done"]
        assert "The episode is over" in say(connection, step("2"))["data"]["message"]


def test_a_huge_frame_costs_its_sender_the_connection_and_nobody_else():
    with served() as url, connect(f"{url}/ws") as good, connect(f"{url}/ws") as bad:
        say(good, reset(seed=1))
        with pytest.raises(ConnectionClosed):
            bad.send("x" * (1 << 24) + "x")
            bad.recv(timeout=20)
        assert say(good, step("1"))["type"] == "observation"
        with pytest.raises(HTTPError) as failed:
            post(url, "/reset", {"x": "x" * (1 << 24)})
        assert failed.value.code == 422 and "at most" in json.load(failed.value)["detail"]


def test_a_key_is_asked_of_everybody(monkeypatch):
    with served(key="sesame") as url:
        assert post(url, "/reset", {}, key="sesame")["done"] is False
        with pytest.raises(HTTPError) as failed:
            post(url, "/reset", {}, key="sesam")
        assert failed.value.code == 401 and "Authorization: Bearer" in json.load(failed.value)["detail"]
        with pytest.raises(Exception, match="HTTP 401"):
            connect(f"{url}/ws").__enter__()
        with gym.make("skyrl/openenv-v0", url=url) as far:
            monkeypatch.setenv("SKYRL_OPENENV_KEY", "wrong")
            with pytest.raises(ConnectionError, match=r"HTTP 401: .*goes into SKYRL_OPENENV_KEY"):
                far.reset()
            monkeypatch.setenv("SKYRL_OPENENV_KEY", "sesame")
            assert far.reset(seed=2)[0] == gym.make("skyrl/text_math-v0").reset(seed=2)[0]
        with pytest.raises(ConnectionError, match="HTTP 404") as elsewhere:
            gym.make("skyrl/openenv-v0", url=f"{url}/x").reset()
        assert "goes into" not in str(elsewhere.value)


def test_http_plays_a_session_by_its_episode_id():
    own = gym.make("skyrl/alfworld_lite-v0")
    with served("skyrl/alfworld_lite-v0") as url:
        (text, info), asked = own.reset(seed=4, options={"split": "val"}), {"seed": 4, "split": "val"}
        begun = [post(url, "/reset", {**asked, "episode_id": name}) for name in ("mine", None)]
        names = [said["observation"]["metadata"].pop("episode_id") for said in begun]
        assert names[0] == "mine" and len(names[1]) == 32
        assert [said["observation"] for said in begun] == plain([{"text": text, "metadata": info}]) * 2
        post(url, "/step", {"episode_id": names[1], "action": {"text": "look"}})
        said = post(url, "/step", {"episode_id": "mine", "action": {"text": "inventory"}})
        assert (said["observation"]["text"], said["reward"]) == own.step("inventory")[:2]
        assert get(url, "/state?episode_id=mine")["step_count"] == 1
        assert get(url, "/state?episode_id=mine")["num_tasks"] == own.unwrapped.num_tasks({"split": "val"})
        with pytest.raises(HTTPError) as failed:
            post(url, "/step", {"action": {"text": "look"}})
        assert failed.value.code == 404 and "There is no session" in json.load(failed.value)["detail"]
        with pytest.raises(HTTPError) as failed:
            post(url, "/reset", {"split": "dev"})
        assert failed.value.code == 422
        assert (
            get(url, "/health") == {"status": "healthy"} and get(url, "/metadata")["name"] == "skyrl/alfworld_lite-v0"
        )
        assert get(url, "/schema")["action"]["required"] == ["text"]


def rpc(method: str, **params: object) -> dict:
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}


def test_tools_are_called_over_mcp():
    own = gym.make("skyrl/tool_use-v0")
    own.reset(seed=1)
    call = '<tool_call>{"tool": "calculator", "args": {"expression": "2*21"}}</tool_call>'
    expected = own.step(call)[0]
    assert "42" in expected
    with served("skyrl/tool_use-v0", sessions=4) as url, connect(f"{url}/mcp") as connection:
        listed = post(url, "/mcp", rpc("tools/list"))["result"]["tools"]
        assert [tool["name"] for tool in listed] == ["calculator", "search", "wiki", "python_exec", "act"]
        assert listed[0]["inputSchema"]["required"] == ["expression"] and listed[0]["description"]
        name = post(url, "/mcp", rpc("openenv/session/create", seed=1))["result"]["session_id"]
        sessions = [(lambda message: post(url, "/mcp", message), {"session_id": name})]
        say(connection, rpc("openenv/session/create", seed=1))
        for ask, where in [*sessions, (lambda message: say(connection, message), {})]:
            done = ask(rpc("tools/call", name="calculator", arguments={"expression": "2*21"}, **where))
            assert done["id"] == 7 and done["result"]["content"] == [{"type": "text", "text": expected}]
            over = ask(rpc("tools/call", name="act", arguments={"text": "<answer>?</answer>"}, **where))
            assert over["result"]["structuredContent"]["done"]
            error = ask(rpc("tools/call", name="hammer", **where))["error"]
            assert error["code"] == -32602 and "calculator, search, wiki" in error["message"]
        assert post(url, "/mcp", rpc("openenv/session/close", session_id=name))["result"]["closed"]
        gone = post(url, "/mcp", rpc("tools/call", session_id=name, name="act", arguments={"text": ""}))
        assert gone["error"]["code"] == -32000 and "There is no session" in gone["error"]["message"]
        assert post(url, "/mcp", [])["error"]["code"] == -32602 and post(url, "/mcp", {})["error"]["code"] == -32602
        assert post(url, "/mcp", rpc("prompts/list"))["error"]["code"] == -32601
        for _ in range(9):  # a refused beginning leaves no session behind
            assert "no option" in post(url, "/mcp", rpc("openenv/session/create", size=1))["error"]["message"]


# What openenv-core 0.3.0 sent, recorded between its clients and a server that only listened, and what they read.
PUBLISHED = [
    ('{"type": "reset", "data": {"seed": 3, "episode_id": "e", "split": "val"}}', "observation"),
    ('{"type": "step", "data": {"text": "\\\\boxed{5}"}}', "observation"),
    ('{"type": "state"}', "state"),
    ('{"type": "reset", "data": {}}', "observation"),
    ('{"type": "step", "data": {"type": "list_tools"}}', "observation"),
    ('{"type": "step", "data": {"type": "call_tool", "tool_name": "act", "arguments": {"text": "1"}}}', "observation"),
]


def test_the_published_clients_frames_are_answered_as_they_read_them():
    with served() as url, connect(f"{url}/ws") as connection:
        replies = [say(connection, sent) for sent, _ in PUBLISHED]
        connection.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=20)
    assert [reply["type"] for reply in replies] == [kind for _, kind in PUBLISHED]
    begun, stepped, state, _, tools, called = (reply["data"] for reply in replies)
    assert [reply.keys() for reply in (begun, stepped, tools, called)] == [{"observation", "reward", "done"}] * 4
    assert begun["reward"] is None and not begun["done"] and stepped["done"] and type(stepped["reward"]) is float
    assert (state["episode_id"], state["step_count"]) == ("e", 1)
    assert tools["observation"]["tools"][0].keys() == {"name", "description", "inputSchema"}
    assert called["observation"]["tool_name"] == "act" and called["observation"]["result"] == ""


SLOW = """
import time

import gymnasium
from skyrl_gym import UnicodeText


class Slow(gymnasium.Env):
    metadata = {"render_modes": [], "waits": True}
    observation_space = action_space = UnicodeText(99)

    def reset(self, *, seed=None, options=None):
        return "go", {}

    def step(self, action):
        if action == "late":
            raise TimeoutError("no answer of a service")
        busy, self.busy = getattr(self, "busy", False), True
        time.sleep(float(action))
        self.busy = False
        return f"{action} {busy}", 1 / float(action), False, False, {}


gymnasium.register("slow/Slow-v0", Slow)
"""


def test_environments_that_wait_hold_up_no_other_session(tmp_path, monkeypatch):
    (tmp_path / "slow_env.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    env_id = skyrl_gym.resolve_env_id("slow_env:slow/Slow-v0")
    with served(env_id, call=3.0) as url, connect(f"{url}/ws") as late, connect(f"{url}/ws") as quick:
        say(late, reset()), say(quick, reset())
        late.send(json.dumps(step("8")))
        assert say(quick, step("0.01"))["data"]["observation"]["text"] == "0.01 False"
        post(url, "/reset", {"episode_id": "one"})
        asked = {"episode_id": "one", "action": {"text": "0.3"}}
        with ThreadPoolExecutor(2) as pool:  # one session's calls are made in turn
            said = list(pool.map(lambda _: post(url, "/step", asked)["observation"]["text"], range(2)))
        assert said == ["0.3 False"] * 2
        assert "longer than 3 s" in json.loads(late.recv(timeout=20))["data"]["message"]
        assert say(late, step("0.01"))["data"]["code"] == "SESSION_ERROR"
        assert "ZeroDivisionError" in say(quick, step("0"))["data"]["message"]
        assert "TimeoutError: no answer of a service" in say(quick, step("late"))["data"]["message"]
    with served(env_id, idle=0.2) as url, connect(f"{url}/ws") as connection:
        say(connection, reset())
        for _ in range(2):  # longer than it may be idle, which it is not
            assert say(connection, step("0.6"))["data"]["observation"]["text"] == "0.6 False"
    with pytest.raises(ValueError, match="only text can be served"):
        prepared("CartPole-v1", "127.0.0.1", 0)


# Servers that others write, behind our environment.


class Guess:
    """A server from the protocol's description alone: think of a number, with actions of text or of JSON."""

    def __init__(self, text: bool) -> None:
        fields = {"guess": {"type": "integer", "minimum": 0}, "note": {"type": "string"}}
        self.text = text
        wanted = {"message": {"type": "string"}} if text else fields
        self.action = {"type": "object", "properties": {**wanted, "metadata": {}}, "required": [next(iter(wanted))]}

    def plain_http(self, connection, request):
        if request.path != "/schema":
            return None
        body = json.dumps({"action": self.action, "observation": {}, "state": {}}).encode()
        return Response(200, "OK", Headers({"Content-Length": str(len(body))}), body)

    def play(self, connection) -> None:
        for message in connection:
            data = json.loads(message)
            if data["type"] == "close":
                return
            if data["type"] == "reset":
                number, seen, reward = data["data"]["seed"] * 7 % 50, {"hint": "0 to 49"}, None
            else:
                guess = int(data["data"]["message"]) if self.text else data["data"]["guess"]
                seen, reward = {"hint": "more" if guess < number else "less"}, float(guess == number)
            seen = seen if self.text else {**seen, "tries": 1}
            said = {"observation": seen, "reward": reward, "done": reward == 1.0}
            connection.send(json.dumps({"type": "observation", "data": said}))


@contextmanager
def others(play, plain_http) -> Iterator[str]:
    with serve_websockets(play, "127.0.0.1", 0, process_request=plain_http, max_size=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


@pytest.mark.parametrize("text", [True, False])
def test_a_server_of_others_plays_100_episodes(text):
    guess, wins = Guess(text), 0
    with others(guess.play, guess.plain_http) as url, gym.make("skyrl/openenv-v0", url=url) as env:
        for seed in range(100):
            observation, info = env.reset(seed=seed)
            assert observation == ("0 to 49" if text else '{"hint": "0 to 49", "tries": 1}')
            assert text or '"guess": {"type": "integer"' in info["instructions"]
            low, high, over = 0, 49, False
            while not over:
                middle = (low + high) // 2
                action = str(middle) if text else f'I think\n```json\n{{"guess": {middle}}}\n```'
                observation, reward, over, truncated, info = env.step(action)
                low, high = (middle + 1, high) if "more" in observation else (low, middle - 1)
            wins += info["success"] and reward == 1.0 and not truncated
    assert wins == 100


class Tools(Guess):
    """A server whose actions are calls of tools, as those of OpenEnv's MCP environments."""

    def __init__(self) -> None:
        fields = {"type": {"const": "call_tool", "default": "call_tool"}, "tool_name": {"type": "string"}}
        fields |= {"arguments": {"type": "object", "additionalProperties": True}, "metadata": {"type": "object"}}
        self.action = {"type": "object", "properties": fields, "required": ["tool_name"], "additionalProperties": False}

    def play(self, connection) -> None:
        for message in connection:
            data = json.loads(message)
            if data["type"] == "close":
                return
            asked = data["data"]
            seen = {} if data["type"] == "reset" else {"tool_name": asked["tool_name"], "result": asked["arguments"]}
            done = data["type"] == "step" and asked["tool_name"] == "echo"
            said = {"observation": seen, "reward": float(done), "done": done}
            connection.send(json.dumps({"type": "observation", "data": said}))


def test_an_environment_of_tools_gets_the_arguments_of_a_call():
    server = Tools()
    with others(server.play, server.plain_http) as url, gym.make("skyrl/openenv-v0", url=url) as env:
        assert '"tool_name": {"type": "string"}' in env.reset(seed=1)[1]["instructions"]
        assert env.step("echo")[4]["valid_action"] is False
        observation, reward, over, *_ = env.step('{"tool_name": "echo", "arguments": {"message": "hi"}}')
    assert json.loads(observation)["result"] == {"message": "hi"} and reward == 1.0 and over


def test_an_action_that_does_not_fit_the_schema_is_answered_and_not_sent():
    guess = Guess(text=False)
    with others(guess.play, guess.plain_http) as url, gym.make("skyrl/openenv-v0", url=url) as env:
        env.reset(seed=1)
        for action in (
            "7",
            "",
            '{"guess": ',
            '{"note": "?"}',
            '{"guess": "7"}',
            '{"guess": -1}',
            '{"guess": 7, "x": NaN}',
            '{"a":' * 50_000,
        ):
            observation, reward, terminated, truncated, info = env.step(action)
            assert (reward, terminated, truncated, info["valid_action"]) == (0.0, False, False, False)
            assert observation.startswith("This action") and "schema" in observation
        assert env.step('{"guess": 7}')[2]


def hostile(kind: str):
    """What a server does with each message."""

    def play(connection) -> None:
        for _ in connection:
            if kind == "silent":
                continue
            if kind == "gone":
                return connection.socket.close()
            connection.send(SENT[kind])

    return play


SENT = {
    "text": "hello",
    "bytes": b"\xff\x00",
    "list": "[1, 2]",
    "nothing": "{}",
    "no data": '{"type": "observation"}',
    "half": '{"type": "observation", "data": {"reward": 1}}',
    "reward": '{"type": "observation", "data": {"observation": "x", "reward": "much", "done": false}}',
    "infinite": '{"type": "observation", "data": {"observation": "x", "reward": 1e999, "done": false}}',
    "done": '{"type": "observation", "data": {"observation": "x", "reward": 1, "done": "no"}}',
    "deep": '{"type": "observation", "data": ' + "[" * 100_000,
    "huge": "x" * ((1 << 24) + 1),
    "refusal": '{"type": "error", "data": {"message": "no such task", "code": "EXECUTION_ERROR"}}',
    "silent": "",
    "gone": "",
}


@pytest.mark.parametrize("kind", SENT)
def test_a_hostile_server_ends_the_episode_with_a_sentence_in_time(kind):
    guess = Guess(text=True)
    limit = 2.0 if kind == "silent" else 20.0
    with others(hostile(kind), guess.plain_http) as url, gym.make("skyrl/openenv-v0", url=url, timeout=limit) as env:
        began = time.monotonic()
        with pytest.raises(ConnectionError) as failed:
            env.reset(seed=1)
        assert time.monotonic() - began < limit + 30
        words = {"silent": "no answer within 2 s", "gone": "out of reach", "huge": "out of reach"}
        words["refusal"] = "refuses the reset: no such task"
        sentence = str(failed.value)
        assert url in sentence and words.get(kind, "talks nonsense") in sentence and len(sentence) < 500
        with served() as good:  # the next episode, elsewhere
            assert env.reset(seed=2, options={"url": good})[0] == gym.make("skyrl/text_math-v0").reset(seed=2)[0]


def test_a_server_that_dies_in_an_episode_is_found_again_by_the_next():
    with gym.make("skyrl/openenv-v0") as env:
        with served() as url:
            env.reset(seed=1, options={"url": url})
        with pytest.raises(ConnectionError, match="out of reach"):
            env.step("1")
        with pytest.raises(ConnectionError, match="out of reach"):
            env.reset(seed=1, options={"url": url})
        for address in ("", "nonsense", "ftp://127.0.0.1:1", "ws://127.0.0.1:x"):
            with pytest.raises(ConnectionError, match=re.escape(repr(address))):
                env.reset(options={"url": address})
        for seconds in (0, -1, "soon", float("nan"), float("inf")):
            with pytest.raises(ValueError, match="timeout is"):
                env.reset(options={"url": url, "timeout": seconds})


def test_a_connection_that_comes_too_late_is_closed():
    """Where an env's own time limit ends its reset, which an alarm does."""
    guess, opened, ended = Guess(text=True), threading.Event(), threading.Event()

    def slow(connection, request):
        if request.path != "/schema":
            time.sleep(0.6)
        return guess.plain_http(connection, request)

    def play(connection) -> None:
        opened.set()
        for _ in connection:
            pass
        ended.set()

    def alarm(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with others(play, slow) as url, gym.make("skyrl/openenv-v0", url=url) as env:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                env.reset(seed=1)
            assert opened.wait(20) and ended.wait(20)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("schema", ["[]", "{}", '{"action": {"type": 3}}', "[" * 100_000, "drip"])
def test_a_schema_that_is_none_is_a_sentence(schema):
    def plain_http(connection, request):
        if schema == "drip":  # a byte of the header now and then
            for _ in range(40):  # for four times the limit
                connection.socket.send(b"H")
                time.sleep(0.1)
        return Response(200, "OK", Headers({"Content-Length": str(len(schema))}), schema.encode())

    limit = 1.0 if schema == "drip" else 20.0
    with others(hostile("text"), plain_http) as url, gym.make("skyrl/openenv-v0", url=url, timeout=limit) as env:
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="no answer within 1 s" if schema == "drip" else "has no schema"):
            env.reset()
        assert time.monotonic() - began < limit + 30


# In the trainer, on the command line, in the documents.


def replies(worker: EnvWorker, calls: list) -> list[EnvReply]:
    """Of calls that wait."""
    assert {reply.kind for reply in worker.call_many(calls)} == {"waiting"}
    ended, patience = {}, time.monotonic() + 60
    while len(ended) < len(calls) and time.monotonic() < patience:
        [reply] = worker.call_many([("ended", "", [key for _, key, _ in calls if key not in ended])])
        ended |= reply.info
        time.sleep(0.02)
    return [EnvReply.read(ended[key]) for _, key, _ in calls]


def test_the_trainers_data_names_servers_and_its_workers_play_them():
    own = gym.make("skyrl/text_math-v0")
    with served() as url:
        source = load_samples([f"openenv:{url}?split=val&difficulty=2&size=32"], seed=3)
        assert len(source) == 32 and source[0].options == {"split": "val", "difficulty": 2, "url": url}
        worker = EnvWorker(step_timeout=30.0)
        begun = replies(worker, [("reset", f"k{i}", source[i]) for i in range(32)])
        expected = [own.reset(seed=s.seed, options={"split": "val", "difficulty": 2}) for s in source]
        assert [[reply.observation, reply.info] for reply in begun] == plain(expected)
        over = replies(worker, [("step", f"k{i}", "\\boxed{1}") for i in range(32)])
        assert all(reply.terminated and reply.error is None for reply in over)
        worker.shutdown()
        with pytest.raises(UserError, match="valid values are 'train', 'val', 'test'"):
            load_samples([f"openenv:{url}?split=dev"])
    with pytest.raises(UserError, match="is out of reach"):
        load_samples([f"openenv:{url}"])


def test_a_server_is_named_wherever_environments_are():
    with served() as url:
        client = gym.make("skyrl/openenv-v0", url=url).unwrapped
        for limit, options in ((2.0, {"timeout": 2.0}), (20.0, None)):
            client.reset(seed=0, options=options)
            assert client._limit == limit, "an option is one episode's"
        envs = skyrl_gym.make_vec(f"openenv:{url}", 4)
        texts, _ = envs.reset(seed=0)
        assert list(texts) == [gym.make("skyrl/text_math-v0").reset(seed=seed)[0] for seed in range(4)]
        envs.close()
        assert skyrl_gym.resolve_env_id("openenv:ws://localhost:1") != skyrl_gym.resolve_env_id(f"openenv:{url}")


@contextmanager
def command(*words: str) -> Iterator[str]:
    """`python -m skyrl_gym serve`; its address."""
    line = [sys.executable, "-m", "skyrl_gym", "serve", *words, "--port", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.terminate()
            process.wait(20)


def test_the_command_serves_until_it_is_told_to_end(capsys):
    with command("text_math", "--max-sessions", "3") as url, gym.make("skyrl/openenv-v0", url=url) as far:
        assert far.reset(seed=8)[0] == gym.make("skyrl/text_math-v0").reset(seed=8)[0]
    for words, sentence in (
        (["text_maths"], "Did you mean text_math"),
        (["text_math", "--host", "0.0.0.0"], "give --key"),
        (["text_math", "--port", "99999"], "Nobody can listen on"),
        (["text_math", "--max-sessions", "0"], "at least one session"),
        (["text_math", "--idle-seconds", "nan"], "more than 0 seconds"),
    ):
        assert main(["serve", *words]) == 2
        assert sentence in capsys.readouterr().err


def test_openenv_yaml_names_an_application(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    assert main(["serve", "webshop_lite", "--port", "7860", "--write-openenv", str(folder)]) == 0
    manifest = yaml.safe_load((folder / "openenv.yaml").read_text())
    assert manifest["spec_version"] == 1 and (manifest["name"], manifest["port"]) == ("webshop_lite", 7860)
    monkeypatch.chdir(folder)
    code = f"from {manifest['app'].replace(':', ' import ')}; print(callable(app))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_a_client_makes_the_server_ask_no_address_and_rows_may_speak_of_one():
    from skyrl_gym.openenv.episode import Episode

    with pytest.raises(ValueError, match="An option names an address"):
        Episode("skyrl/kuhn_poker-v0").reset({"seed": 1, "opponent": "self,http://127.0.0.1:9/v1"})
    for name in ("rows", "tasks"):
        with pytest.raises(ValueError, match="An option names an address or files"):
            Episode("skyrl/gsm8k-v0").reset({name: "/etc/passwd"})
    row = {"prompt": "What is at http://example.com?", "ground_truth": "nothing"}
    assert "http://example.com" in Episode("skyrl/gsm8k-v0").reset({"task": row})["observation"]["text"]
