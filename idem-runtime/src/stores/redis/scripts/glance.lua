-- Returns the parts of a record that a list shows: its start, its length, its remaining retention, and the end of its
-- retention (-1 if the login may not ask for it). KEYS: record. ARGV: number of bytes of the start.
local expires_at = redis.pcall('PEXPIRETIME', KEYS[1])
if type(expires_at) ~= 'number' then expires_at = -1 end
return {
  redis.call('GETRANGE', KEYS[1], 0, ARGV[1] - 1), redis.call('STRLEN', KEYS[1]), redis.call('PTTL', KEYS[1]), expires_at
}
