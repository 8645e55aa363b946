"""An agent of one's own, learned from: skyrl-trainer train tool_use generator.agent.run=examples/my_agent.py:agent

It asks the policy as it would ask any OpenAI endpoint, and plays the task's own env, which gives the reward.
"""

from openai import AsyncOpenAI

# Made once for all episodes: each new client reads the certificates, which takes as long as several turns.
CLIENT = AsyncOpenAI(base_url="http://of-the-episode", api_key="of the episode")


async def agent(task):
    client = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    observation, info = task.reset()
    messages = [{"role": "user", "content": observation}]
    if info.get("instructions"):
        messages.insert(0, {"role": "system", "content": info["instructions"]})
    over = False
    while not over:
        reply = await client.chat.completions.create(model=task.model, messages=messages)
        said = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": said})
        observation, _, terminated, truncated, _ = task.step(said)
        messages.append({"role": "user", "content": observation})
        over = terminated or truncated
