"""LangChain. `pip install langchain-openai`."""

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    model=os.environ.get("MODEL", "smollm2-135m"),
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    max_tokens=30,
)
chain = ChatPromptTemplate.from_messages([("system", "You are brief."), ("human", "What is {thing}?")]) | chat

print(chain.invoke({"thing": "a queue"}).content)
for chunk in chain.stream({"thing": "a scheduler"}):
    print(chunk.content, end="", flush=True)
print()
for answer in chain.batch([{"thing": thing} for thing in ("bread", "water", "salt")]):
    print(answer.content)
