-- Replaces the record that was read by a new pending record, or returns the rest of the lease of the stored record.
-- KEYS: record. ARGV: the record that was read (as `identity` returns it), its lease and retention, new record ('' to
-- only ask), its retention, wake channel. All times in milliseconds.
-- Answers the rest of the lease; 0 lapsed and left alone; -2 replaced; -1 no record; or, if another record is there
-- now, that record and the rest of its lease (0 unless it is pending).
local record = redis.call('GET', KEYS[1])
if not record then return -1 end
local ours, pending = string.sub(record, 1, 5) == 'idem\1', string.sub(record, 6, 6) == 'P'
local retention
if ours and pending then
  retention = redis.call('PTTL', KEYS[1])
  if retention == -1 then return redis.error_reply('DAMAGED no expiry') end
end
if not ours or identity(record) ~= ARGV[1] then
  local left = 0
  if retention then
    local fingerprint = bit.band(string.byte(record, 7), 4) * 8
    if #record >= 64 + fingerprint then left = math.max(0, retention - struct.unpack('>I8', record, 57 + fingerprint)) end
  end
  return { record, left }
end
if pending then
  -- Every renewal sets the full retention anew, so the elapsed part of the retention is the age of the lease.
  local left = tonumber(ARGV[2]) - (tonumber(ARGV[3]) - retention)
  if left > 0 then return left end
end
if ARGV[4] == '' then return 0 end
local taken = string.sub(ARGV[4], 1, 32) .. string.sub(times(KEYS[1], record), 1, 8) .. string.sub(ARGV[4], 41)
redis.call('SET', KEYS[1], taken, 'PX', ARGV[5])
if string.byte(record, 7) % 2 == 1 then redis.pcall('PUBLISH', ARGV[6], KEYS[1]) end
return -2
