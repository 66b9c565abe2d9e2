-- Puts a journal at the end of the record of a pending attempt, and renews its lease, even if the lease has lapsed.
-- KEYS: record. ARGV: owner token with the attempt's number, journal, lease and ttl together in milliseconds. The
-- stored journal stays if it is as long as the new one or longer: a late copy of an earlier request must not remove
-- later entries. Answers 1 done, now or by another request; 0 refused.
local record = redis.call('GET', KEYS[1])
if not record or string.sub(record, 1, 6) ~= 'idem\1P' or string.sub(record, 9, 28) ~= ARGV[1] then return 0 end
if redis.call('PTTL', KEYS[1]) == -1 then return redis.error_reply('DAMAGED no expiry') end
local flags = string.byte(record, 7)
-- The journal follows the provenance, or lease and ttl if the record has no provenance.
local journal_at = 65 + bit.band(flags, 4) * 8
if bit.band(flags, 8) ~= 0 then
  -- A provenance is three texts after one byte with their length, and one text after two bytes with its length.
  for _ = 1, 3 do journal_at = journal_at + 1 + string.byte(record, journal_at) end
  journal_at = journal_at + 2 + struct.unpack('>I2', record, journal_at)
end
local journal = string.sub(record, journal_at)
if #journal < #ARGV[2] then journal = ARGV[2] end
redis.call('SET', KEYS[1], string.sub(record, 1, 7) .. '\4' .. string.sub(record, 9, 32) .. times(KEYS[1], record)
  .. string.sub(record, 49, journal_at - 1) .. journal, 'PX', ARGV[3])
return 1
