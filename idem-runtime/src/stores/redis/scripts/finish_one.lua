-- Finishes one record, at less cost than the script for many. KEYS: record. ARGV: wake channel, new record, retention.
-- The stored record and the new record must have the same owner token and attempt number. A stored record that has lost
-- its expiry gets an expiry again: no other attempt can have taken over such a record. Answers 1 done, 0 refused.
local record = redis.call('GET', KEYS[1])
if not record or string.sub(record, 1, 5) ~= 'idem\1' then return 0 end
if string.sub(record, 9, 28) ~= string.sub(ARGV[2], 9, 28) then return 0 end
local state, flags = string.byte(record, 6, 7)
if state == 80 then
  redis.call('SET', KEYS[1], timed(KEYS[1], record, ARGV[2]), 'PX', ARGV[3])
  -- Waiters also poll, so a login without the right to publish does not fail this write.
  if flags % 2 == 1 then redis.pcall('PUBLISH', ARGV[1], KEYS[1]) end
  return 1
end
if state == 67 or state == 70 then return 1 end
return 0
