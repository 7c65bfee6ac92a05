"""What the scheduler believes of a worker's memory once nobody runs there any more."""

from protos.v1 import inference_pb2
from scheduler_service.store import MemoryStore
from tests.scheduler.live import WAIT_S, ScriptedGateway, ScriptedWorker, scheduler
from tests.waiting import until


async def test_memory_that_a_cancelled_request_gave_back_is_free_without_another_round() -> None:
    async with scheduler(MemoryStore()) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)

        async def free(blocks: int) -> None:
            async def told() -> bool:
                stats = await gateway.unary.Stats(inference_pb2.StatsRequest(), timeout=WAIT_S)
                return [one.free_blocks for one in stats.workers] == [blocks]

            await until(told)

        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7), free_blocks=50)
        await free(50)
        await gateway.cancel("a")
        command = await worker.until()
        assert list(command.forget) == ["a"]
        await worker.report(command_seq=command.seq, free_blocks=64)
        await free(64)
        for peer in (worker, gateway):
            await peer.close()
