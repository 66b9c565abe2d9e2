-- The table of `PostgresStore`, version 1. `PostgresOptions::ensure_schema` runs these statements for a schema of any name.
--
-- `listed_at` is the time at which a purge reads a row, no later than `expires_at`. No other time is indexed, and a record
-- that finishes as planned keeps its `listed_at`, so that its completion changes no index (except under `on_crash = fail`).
-- The fill factor leaves space for the completed row in the same page.
CREATE SCHEMA IF NOT EXISTS "idem";

CREATE TABLE IF NOT EXISTS "idem".records (
    listed_at     timestamptz NOT NULL,
    expires_at    timestamptz NOT NULL,
    lapses_at     timestamptz NOT NULL,
    first_seen_at timestamptz NOT NULL,
    began_at      timestamptz NOT NULL,
    attempt       bigint NOT NULL CHECK (attempt > 0),
    attempts_used bigint NOT NULL CHECK (attempts_used >= 0),
    lease_ms      bigint,
    ttl_ms        bigint,
    result_bytes  bigint,
    format        smallint NOT NULL,
    on_crash_fail boolean NOT NULL,
    begun         boolean NOT NULL DEFAULT false,
    waited        boolean NOT NULL DEFAULT false,
    state         text NOT NULL,
    owner         bytea NOT NULL,
    key           text COLLATE "C" PRIMARY KEY,
    fingerprint   bytea,
    holder        text,
    traceparent   text,
    decided_by    text,
    decided_reason text,
    codec         text,
    result        bytea
) PARTITION BY HASH (key);

-- The server compresses results that do not fit into a page. lz4 takes a fraction of the time that pglz takes. Servers from
-- version 14 on have lz4 if they were built with it. A compression that was chosen earlier stays in use.
DO 'BEGIN
    IF EXISTS (SELECT FROM pg_settings WHERE name = ''default_toast_compression'' AND ''lz4'' = ANY (enumvals))
        AND EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = ''"idem".records''::regclass
            AND a.attname = ''result'' AND to_jsonb(a)->>''attcompression'' = '''')
    THEN EXECUTE ''ALTER TABLE "idem".records ALTER COLUMN result SET COMPRESSION lz4'';
    END IF;
END';

CREATE TABLE IF NOT EXISTS "idem".records_0 PARTITION OF "idem".records
    FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (fillfactor = 30);
CREATE TABLE IF NOT EXISTS "idem".records_1 PARTITION OF "idem".records
    FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (fillfactor = 30);

CREATE INDEX IF NOT EXISTS records_listed_at ON "idem".records (listed_at);

-- The keys under `on_crash = fail` that run or wait for an operator. Other records are not in this index.
CREATE INDEX IF NOT EXISTS records_undecided ON "idem".records (key) WHERE on_crash_fail;

COMMENT ON TABLE "idem".records IS 'idem 1';
COMMENT ON COLUMN "idem".records.listed_at IS 'when a purge looks at the row; never later than expires_at';
COMMENT ON COLUMN "idem".records.expires_at IS 'when the record is forgotten, unless it is written again';
COMMENT ON COLUMN "idem".records.lapses_at IS 'pending: when the lease lapses unless it is renewed; otherwise: when it ended';
COMMENT ON COLUMN "idem".records.first_seen_at IS 'when the key was first seen';
COMMENT ON COLUMN "idem".records.began_at IS 'when the latest attempt began';
COMMENT ON COLUMN "idem".records.attempt IS 'the number of the latest attempt: the fencing token';
COMMENT ON COLUMN "idem".records.attempts_used IS 'how many attempts count against max_attempts';
COMMENT ON COLUMN "idem".records.lease_ms IS 'pending: how long the lease is without a renewal';
COMMENT ON COLUMN "idem".records.ttl_ms IS 'pending: how long the record is kept beyond its lease';
COMMENT ON COLUMN "idem".records.result_bytes IS 'the size of a result that was too large to be stored';
COMMENT ON COLUMN "idem".records.format IS 'the version of the row';
COMMENT ON COLUMN "idem".records.on_crash_fail IS 'whether the record waits for an operator: pending under on_crash = fail, or interrupted';
COMMENT ON COLUMN "idem".records.begun IS 'pending: whether the body has begun, where that is marked (on_crash = fail, max_attempts)';
COMMENT ON COLUMN "idem".records.waited IS 'whether a duplicate waits for the end of the attempt';
COMMENT ON COLUMN "idem".records.state IS 'pending, released, interrupted, completed or failed';
COMMENT ON COLUMN "idem".records.owner IS 'the random identity of the latest attempt';
COMMENT ON COLUMN "idem".records.key IS '1/<scope>/<key>';
COMMENT ON COLUMN "idem".records.fingerprint IS 'the hash of the payload; its first byte is its version';
COMMENT ON COLUMN "idem".records.holder IS 'who made the latest attempt: <host>/<process>/<name>';
COMMENT ON COLUMN "idem".records.traceparent IS 'the trace of the latest attempt';
COMMENT ON COLUMN "idem".records.decided_by IS 'the operator who decided about the record last';
COMMENT ON COLUMN "idem".records.decided_reason IS 'why they decided so';
COMMENT ON COLUMN "idem".records.codec IS 'what wrote the result';
COMMENT ON COLUMN "idem".records.result IS 'the result';
