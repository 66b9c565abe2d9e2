-- Removes a value that can't be read, if it is still the value that was read before. KEYS: record. ARGV: the value,
-- whether the value has an expiry ('1' or '0'), wake channel. Answers 1 done, 0 another value is there.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local expires = redis.call('PTTL', KEYS[1]) >= 0
if expires ~= (ARGV[2] == '1') then return 0 end
-- Removes the value by its expiry: `DEL` would need a right that no other operation needs.
redis.call('PEXPIRE', KEYS[1], 0)
redis.pcall('PUBLISH', ARGV[3], KEYS[1])
return 1
