-- Replaces the record that was met by a new pending one, or tells how long its lease still holds.
-- KEYS: record. ARGV: what was met (state, then bytes 9 to 32), its lease and retention, new record ('' to only ask), its
-- retention, wake channel. Milliseconds throughout.
-- Answers the milliseconds that are left, 0 lapsed and left alone, -2 replaced; or the record that is there now, if it is
-- not the one that was met, -1 if there is none.
local record = redis.pcall('GET', KEYS[1])
if type(record) ~= 'string' then return -1 end
local state = string.sub(record, 6, 6)
if string.sub(record, 1, 5) ~= 'idem\1' or state .. string.sub(record, 9, 32) ~= ARGV[1] then return record end
if state == 'P' then
  -- Every renewal sets the whole retention anew, so what has passed of it is the age of the lease.
  local left = tonumber(ARGV[2]) - (tonumber(ARGV[3]) - redis.call('PTTL', KEYS[1]))
  if left > 0 then return left end
end
if ARGV[4] == '' then return 0 end
redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
if string.byte(record, 7) % 2 == 1 then redis.pcall('PUBLISH', ARGV[6], KEYS[1]) end
return -2
