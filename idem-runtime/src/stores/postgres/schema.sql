-- The table of `PostgresStore`, version 1. `PostgresOptions::ensure_schema` runs the same, for a schema of any name.
--
-- `listed_at` is when the purge looks at a row, no later than `expires_at`. It is the only indexed time: a record that
-- finishes as planned keeps it, so that its completion changes no index. The fill factor leaves room for that in the page.
CREATE SCHEMA IF NOT EXISTS "idem";

CREATE TABLE IF NOT EXISTS "idem".records (
    listed_at     timestamptz NOT NULL,
    expires_at    timestamptz NOT NULL,
    lapses_at     timestamptz NOT NULL,
    attempt       bigint NOT NULL CHECK (attempt > 0),
    starts        bigint NOT NULL CHECK (starts >= 0),
    lease_ms      bigint,
    ttl_ms        bigint,
    result_bytes  bigint,
    format        smallint NOT NULL,
    on_crash_fail boolean NOT NULL,
    waited        boolean NOT NULL DEFAULT false,
    state         text NOT NULL,
    owner         bytea NOT NULL,
    key           text COLLATE "C" PRIMARY KEY,
    fingerprint   bytea,
    codec         text,
    result        bytea
) WITH (fillfactor = 30);

CREATE INDEX IF NOT EXISTS records_listed_at ON "idem".records (listed_at);

COMMENT ON TABLE "idem".records IS 'idem 1';
