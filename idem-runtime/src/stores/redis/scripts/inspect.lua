-- Returns the record, its remaining retention, and the end of its retention (-1 if the login may not ask for it), read
-- in one step. KEYS: record.
local expires_at = redis.pcall('PEXPIRETIME', KEYS[1])
if type(expires_at) ~= 'number' then expires_at = -1 end
return { redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), expires_at }
