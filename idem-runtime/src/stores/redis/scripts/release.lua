-- Ends an attempt without a result. The journal stays for the next attempt. KEYS: record. ARGV: owner token, new state,
-- starts to refund, retention, wake channel.
-- Answers 1 done, 0 refused.
local record = redis.call('GET', KEYS[1])
if not record or string.sub(record, 1, 5) ~= 'idem\1' then return 0 end
if string.sub(record, 9, 24) ~= ARGV[1] then return 0 end
local state = string.sub(record, 6, 6)
if state == 'R' or state == 'I' then return 1 end
if state ~= 'P' then return 0 end
if redis.call('PTTL', KEYS[1]) == -1 then return redis.error_reply('DAMAGED no expiry') end
local flags = string.byte(record, 7)
local lease_at = 49 + bit.band(flags, 4) * 8
local starts = math.max(0, struct.unpack('>I4', record, 29) - tonumber(ARGV[3]))
-- Leaves out lease and ttl, which stand between the fingerprint and the provenance. Byte 8 stays: it shows whether the
-- record ends with a journal.
redis.call('SET', KEYS[1], string.sub(record, 1, 5) .. ARGV[2] .. string.char(bit.band(flags, 12))
  .. string.sub(record, 8, 28) .. struct.pack('>I4', starts) .. times(KEYS[1], record)
  .. string.sub(record, 49, lease_at - 1) .. string.sub(record, lease_at + 16), 'PX', ARGV[4])
if flags % 2 == 1 then redis.pcall('PUBLISH', ARGV[5], KEYS[1]) end
return 1
