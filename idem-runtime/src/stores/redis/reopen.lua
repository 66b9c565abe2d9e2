-- Lets the next delivery run. KEYS: record. ARGV: number of the inspected attempt (4 bytes), wake channel.
-- Answers 1 done, 0 refused.
local record = redis.call('GET', KEYS[1])
if not record or string.sub(record, 1, 5) ~= 'idem\1' then return 0 end
if string.sub(record, 25, 28) ~= ARGV[1] then return 0 end
local state, flags = string.sub(record, 6, 6), string.byte(record, 7)
if not string.find('PRICF', state, 1, true) then return 0 end
local fingerprint = ''
if bit.band(flags, 4) ~= 0 then fingerprint = string.sub(record, 33, 64) end
if state == 'P' then
  -- A pending record is retained for its lease and its ttl: the lease holds while more than the ttl is left.
  local ttl, left = struct.unpack('>I8', record, 41 + #fingerprint), redis.call('PTTL', KEYS[1])
  if left == -1 then return redis.error_reply('DAMAGED no expiry') end
  if left > ttl then return 0 end
end
redis.call('SET', KEYS[1], string.sub(record, 1, 5) .. 'R' .. string.char(bit.band(flags, 4)) .. '\0'
  .. string.sub(record, 9, 28) .. '\0\0\0\0' .. fingerprint, 'KEEPTTL')
if flags % 2 == 1 then redis.pcall('PUBLISH', ARGV[2], KEYS[1]) end
return 1
