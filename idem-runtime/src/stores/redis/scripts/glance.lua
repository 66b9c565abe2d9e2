-- What a list needs of a record: its start, its length, its remaining retention, and when that ends (-1 if that can't be asked).
-- KEYS: record. ARGV: how many bytes of it.
local expires_at = redis.pcall('PEXPIRETIME', KEYS[1])
if type(expires_at) ~= 'number' then expires_at = -1 end
return {
  redis.call('GETRANGE', KEYS[1], 0, ARGV[1] - 1), redis.call('STRLEN', KEYS[1]), redis.call('PTTL', KEYS[1]), expires_at
}
