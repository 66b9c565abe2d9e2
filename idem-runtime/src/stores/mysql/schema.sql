-- The table of `MySqlStore`, version 1. `MySqlOptions::ensure_schema` runs this statement for a table of any name.
--
-- All texts are binary, because the servers' other collations compare texts that differ as equal. All times are
-- microseconds since 1970 in UTC, by the server's clock, so that no time zone of a session changes them:
-- `FROM_UNIXTIME(lapses_at / 1000000)` shows one. `listed_at` is the time at which a purge reads a row, no later than
-- `expires_at`. A record that finishes as planned keeps its `listed_at`, so that its completion changes no index (except
-- under `on_crash = fail`).
CREATE TABLE IF NOT EXISTS `idem_records` (
    `key`            varbinary(1024) NOT NULL COMMENT '1/<scope>/<key>',
    `format`         smallint NOT NULL COMMENT 'the version of the row',
    `state`          varbinary(11) NOT NULL COMMENT 'pending, released, interrupted, completed or failed',
    `owner`          varbinary(16) NOT NULL COMMENT 'the random identity of the latest attempt',
    `attempt`        bigint NOT NULL COMMENT 'the number of the latest attempt: the fencing token',
    `attempts_used`  bigint NOT NULL COMMENT 'how many attempts count against max_attempts',
    `fingerprint`    varbinary(64) COMMENT 'the hash of the payload; its first byte is its version',
    `on_crash_fail`  tinyint NOT NULL COMMENT 'whether the record waits for an operator: pending under on_crash = fail, or interrupted',
    `begun`          tinyint NOT NULL DEFAULT 0 COMMENT 'pending: whether the body has begun, where that is marked',
    `lease_ms`       bigint COMMENT 'pending: how long the lease is without a renewal',
    `ttl_ms`         bigint COMMENT 'pending: how long the record is kept beyond its lease',
    `lapses_at`      bigint NOT NULL COMMENT 'pending: when the lease lapses unless it is renewed; otherwise: when it ended',
    `expires_at`     bigint NOT NULL COMMENT 'when the record is forgotten, unless it is written again',
    `listed_at`      bigint NOT NULL COMMENT 'when a purge looks at the row; never later than expires_at',
    `first_seen_at`  bigint NOT NULL COMMENT 'when the key was first seen',
    `began_at`       bigint NOT NULL COMMENT 'when the latest attempt began',
    `holder`         varbinary(255) COMMENT 'who made the latest attempt: <host>/<process>/<name>',
    `traceparent`    varbinary(64) COMMENT 'the trace of the latest attempt',
    `decided_by`     varbinary(255) COMMENT 'the operator who decided about the record last',
    `decided_reason` varbinary(1000) COMMENT 'why they decided so',
    `codec`          varbinary(32) COMMENT 'what wrote the result',
    `result_bytes`   bigint COMMENT 'the size of a result that was too large to be stored',
    `result`         longblob COMMENT 'the result; of an unfinished operation, the journal of its steps',
    `result_length`  bigint GENERATED ALWAYS AS (octet_length(`result`)) STORED COMMENT 'the length of result',
    PRIMARY KEY (`key`),
    KEY `listed_at` (`listed_at`),
    KEY `undecided` (`on_crash_fail`, `key`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = binary COMMENT = 'idem 1';
