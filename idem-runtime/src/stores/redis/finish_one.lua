-- Finishes one record, for less than the script for many. KEYS: record. ARGV: wake channel, owner token, new record,
-- retention. Answers 1 done, 0 refused.
local record = redis.pcall('GET', KEYS[1])
if type(record) ~= 'string' or string.sub(record, 9, 24) ~= ARGV[2] or string.sub(record, 1, 5) ~= 'idem\1' then return 0 end
local state, flags = string.byte(record, 6, 7)
if state == 80 then
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
  if flags % 2 == 1 then redis.pcall('PUBLISH', ARGV[1], KEYS[1]) end
  return 1
end
if state == 67 or state == 70 then return 1 end
return 0
