-- Writes to a key without changing anything, so that `WAIT` has a write to wait for. KEYS: any key.
-- Answers 1.
local at = redis.call('PEXPIRETIME', KEYS[1])
if at >= 0 then
  -- Setting the same expiry again is a write, too, and changes nothing.
  redis.call('PEXPIREAT', KEYS[1], at)
elseif at == -1 then
  redis.call('PEXPIREAT', KEYS[1], 32503680000000)
  redis.call('PERSIST', KEYS[1])
else
  redis.call('SET', KEYS[1], '')
  redis.call('DEL', KEYS[1])
end
return 1
