-- Marks that the body of a pending attempt begins, and renews its lease. KEYS: record. ARGV: owner token with the
-- attempt's number, ttl, lease and ttl together, in milliseconds. An attempt whose lease has lapsed is not marked: a
-- late request must not mark a record. Answers 1 marked, now or by an earlier copy of the request; 0 refused.
local record = redis.call('GETRANGE', KEYS[1], 0, 95)
if string.sub(record, 1, 6) ~= 'idem\1P' or string.sub(record, 9, 28) ~= ARGV[1] then return 0 end
local left, flags = redis.call('PTTL', KEYS[1]), string.byte(record, 7)
if left == -1 then return redis.error_reply('DAMAGED no expiry') end
if bit.band(flags, 16) == 0 then
  -- A pending record is retained for its lease and its ttl: the lease holds while more than the ttl is left.
  if left <= tonumber(ARGV[2]) then return 0 end
  redis.call('SETRANGE', KEYS[1], 6, string.char(flags + 16))
end
if string.sub(record, 41, 48) == NEVER then redis.pcall('SETRANGE', KEYS[1], 32, times(KEYS[1], record)) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
