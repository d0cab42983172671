#!/usr/bin/env python3
"""Asks dflashd one question and prints the answer as it comes: reasoning, text, tool calls, then the summary."""
import sys

import grpc
from dflash.v1 import generation_pb2, inference_pb2


def main(address, question):
    with grpc.insecure_channel(address) as channel:
        # Without generated stubs: a method is its name and how messages become bytes.
        model_info = channel.unary_unary(
            "/dflash.v1.InferenceService/GetModelInfo",
            request_serializer=inference_pb2.GetModelInfoRequest.SerializeToString,
            response_deserializer=inference_pb2.GetModelInfoResponse.FromString)
        generate = channel.unary_stream(
            "/dflash.v1.InferenceService/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString)

        info = model_info(inference_pb2.GetModelInfoRequest(), timeout=10)
        print(f"model {info.model} on {info.backend}, up to {info.max_context_tokens} tokens", file=sys.stderr)

        request = generation_pb2.GenerateRequest()
        request.chat.messages.add(role="user", content=question)
        request.sampling.seed = 7
        request.stopping.max_tokens = 64
        request.stopping.max_thinking_tokens = 32
        request.output.parse = True
        for response in generate(request, timeout=120):
            event = response.WhichOneof("event")
            if event == "chunk":
                if response.chunk.reasoning:
                    print(response.chunk.reasoning, end="", flush=True, file=sys.stderr)
                print(response.chunk.text, end="", flush=True)
                for call in response.chunk.tool_calls:
                    print(f"\ncall {call.name}({call.arguments_json})")
            elif event == "finished":
                done = response.finished
                print()
                print(f"{done.usage.completion_tokens} tokens, {done.speculation.mean_acceptance_length:.2f} a round, "
                      f"{generation_pb2.FinishReason.Name(done.reason)}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} HOST:PORT QUESTION")
    try:
        main(sys.argv[1], sys.argv[2])
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
