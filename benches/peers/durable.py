"""DBOS on PostgreSQL: workflows whose id is the order, without steps and with three. Argument: the URL of the server."""

import os
import sys

from dbos import DBOS, SetWorkflowID

from sides import receipt, serve

URL = sys.argv[1]


@DBOS.workflow()
def ship(order_id):
    return receipt(order_id)


@DBOS.step()
def charge(order_id):
    return receipt(order_id)


@DBOS.step()
def reserve(order_id):
    return receipt(order_id)


@DBOS.step()
def book(order_id):
    return receipt(order_id)


@DBOS.workflow()
def fulfil(order_id):
    charge(order_id)
    reserve(order_id)
    return book(order_id)


def connect(threads):
    config = {
        "name": "bench",
        "system_database_url": URL,
        "sys_db_pool_size": threads + 2,
        "max_executor_threads": threads + 2,
        "executor_id": str(os.getpid()),
        "application_version": "1",
        "log_level": "ERROR",
        "console_log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()

    def call(work, order_id):
        with SetWorkflowID(f"order:{order_id}"):
            return fulfil(order_id) if work == "steps" else ship(order_id)

    return call


serve(connect)
