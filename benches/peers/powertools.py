"""The idempotency decorator of AWS Lambda Powertools for Python, on Redis.

Arguments: the port; `cached` for its local cache; `hiredis` for the parser in C, which `aws-lambda-powertools[redis]` does not
bring along, but which the client takes if it is there.
"""

import sys

if "hiredis" not in sys.argv:
    sys.modules["hiredis"] = None

import redis
from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

from sides import receipt, serve

PORT, CACHED = int(sys.argv[1]), "cached" in sys.argv[2:]


class Context:
    """A context as Lambda passes it: its remaining time bounds how long an attempt counts as running."""

    @staticmethod
    def get_remaining_time_in_millis():
        return 30_000


def connect(threads):
    client = redis.Redis(port=PORT, decode_responses=True)
    config = IdempotencyConfig(
        event_key_jmespath="order_id",
        expires_after_seconds=7 * 86_400,
        use_local_cache=CACHED,
        local_cache_max_items=100_000,
        lambda_context=Context(),
    )

    @idempotent_function(
        data_keyword_argument="order",
        config=config,
        persistence_store=CachePersistenceLayer(client=client),
        key_prefix="bench",
    )
    def ship(order):
        return receipt(order["order_id"])

    return lambda work, order_id: ship(order={"order_id": order_id})


serve(connect)
