-- The record and its remaining retention, read in one step. KEYS: record.
return { redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]) }
