-- Replaces or removes a record by an operator's decision, if the record is unchanged since it was read. The record
-- keeps its retention. KEYS: record. ARGV: the record that was read (as `identity` returns it), its ttl in milliseconds
-- if its lease must have lapsed ('' otherwise), new record ('' to remove it), wake channel. Answers 1 done; 0 if another
-- record is there, or if the lease was renewed.
local record = redis.call('GET', KEYS[1])
if not record or string.sub(record, 1, 5) ~= 'idem\1' then return 0 end
if identity(record) ~= ARGV[1] then return 0 end
if ARGV[2] ~= '' then
  -- A pending record is retained for its lease and its ttl: the lease holds while more than the ttl is left.
  local left = redis.call('PTTL', KEYS[1])
  if left == -1 then return redis.error_reply('DAMAGED no expiry') end
  if left > tonumber(ARGV[2]) then return 0 end
end
if ARGV[3] ~= '' then
  redis.call('SET', KEYS[1], timed(KEYS[1], record, ARGV[3]), 'KEEPTTL')
else
  -- Removes the record by its expiry: `DEL` would need a right that no other operation needs.
  redis.call('PEXPIRE', KEYS[1], 0)
end
if string.byte(record, 7) % 2 == 1 then redis.pcall('PUBLISH', ARGV[4], KEYS[1]) end
return 1
