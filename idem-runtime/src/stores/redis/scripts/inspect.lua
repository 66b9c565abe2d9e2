-- The record, its remaining retention, and when that ends (-1 if that can't be asked), read in one step. KEYS: record.
local expires_at = redis.pcall('PEXPIRETIME', KEYS[1])
if type(expires_at) ~= 'number' then expires_at = -1 end
return { redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), expires_at }
