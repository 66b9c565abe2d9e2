"""A peer as a child process: reads what to do line by line, answers with thousands of calls a second.

A line is `WORK COUNT PROCESSES THREADS FIRST`, for example `replay 2000 2 4 0`: `COUNT` calls for the orders from `FIRST` on
(replays: for the first thousand of them, in turn), shared out over processes and their threads. Only the calls are timed;
processes and connections are there before.
"""

import ctypes
import multiprocessing
import signal
import sys
import threading
import time

RESULT_OF = {
    "carrier": "Hinterland Parcel",
    "tracking": "HP-2031-0000-4711-8842-XZ",
    "cents": 129900,
    "currency": "EUR",
    "lines": 3,
    "express": True,
}


# Number of orders to replay.
SHIPPED = 1000


def receipt(order_id):
    """The result that every side records: some 150 bytes of JSON."""
    return {"order_id": order_id, **RESULT_OF}


def _serve(connect, threads, pipe):
    # PR_SET_PDEATHSIG: the kernel ends this process if its parent dies, even by a kill.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    call = connect(threads)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        work, orders = job
        failures = []

        def each(orders):
            try:
                for order_id in orders:
                    result = call(work, order_id)
                    if result["order_id"] != order_id:
                        raise AssertionError(result)
            except BaseException as failure:  # The parent reads the failure.
                failures.append(repr(failure))

        if threads == 1:
            each(orders)
        else:
            running = [threading.Thread(target=each, args=(orders[n::threads],)) for n in range(threads)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
        pipe.send(failures[0] if failures else None)


class _Pool:
    def __init__(self, connect, processes, threads):
        self.workers = []
        context = multiprocessing.get_context("fork")
        for _ in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(connect, threads, theirs), daemon=True)
            worker.start()
            self.workers.append((worker, ours))
        for _, pipe in self.workers:
            pipe.recv()

    def run(self, work, first, count):
        orders = range(first, first + count)
        if work == "replay":
            orders = [first + n % SHIPPED for n in range(count)]
        started = time.perf_counter()
        for n, (_, pipe) in enumerate(self.workers):
            pipe.send((work, orders[n :: len(self.workers)]))
        failures = [pipe.recv() for _, pipe in self.workers]
        took = time.perf_counter() - started
        if any(failures):
            sys.exit(next(failure for failure in failures if failure))
        return count / took / 1000

    def close(self):
        for worker, pipe in self.workers:
            pipe.send(None)
        for worker, _ in self.workers:
            worker.join(5)
            worker.kill()


def serve(connect):
    """Answers each line until the input ends. `connect(threads)` returns `call(work, order_id)` for one process."""
    size, pool = None, None
    print("ready", flush=True)
    for line in sys.stdin:
        work, *numbers = line.split()
        count, processes, threads, first = map(int, numbers)
        if size != (processes, threads):
            if pool:
                pool.close()
            size, pool = (processes, threads), _Pool(connect, processes, threads)
        print(pool.run(work, first, count), flush=True)
    if pool:
        pool.close()
