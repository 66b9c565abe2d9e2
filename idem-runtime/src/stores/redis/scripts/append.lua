-- Puts journals at the ends of the records of pending attempts, and renews their leases, even if a lease has lapsed.
-- KEYS: records. ARGV: for each key its owner token with the attempt's number and the time of its reservation (zeros if
-- unknown), its journal, lease and ttl together in milliseconds. A stored journal stays if it is as long as the new one
-- or longer: a late copy of an earlier request must not remove later entries. A record that has lost its expiry gets an
-- expiry again: no other attempt can have taken over such a record. Answers one character per key: 1 done, now or by
-- another request; 0 refused; E not written, because of an error. The errors follow, one for each E.
local KEYS, ARGV, call, sub, byte = KEYS, ARGV, redis.call, string.sub, string.byte
-- Returns the answer for one key, and its record afterwards.
local function append(key, record, attempt, journal, expiry)
  if not record or sub(record, 1, 6) ~= 'idem\1P' or sub(record, 9, 28) ~= sub(attempt, 1, 20) then return '0', record end
  local flags = byte(record, 7)
  -- The journal follows the provenance, or lease and ttl if the record has no provenance.
  local journal_at = 65 + bit.band(flags, 4) * 8
  if bit.band(flags, 8) ~= 0 then
    -- A provenance is three texts after one byte with their length, and one text after two bytes with its length.
    for _ = 1, 3 do journal_at = journal_at + 1 + byte(record, journal_at) end
    journal_at = journal_at + 2 + struct.unpack('>I2', record, journal_at)
  end
  if #record - journal_at + 1 >= #journal then journal = sub(record, journal_at) end
  local new
  if byte(record, 8) == 4 and sub(record, 41, 48) ~= NEVER then
    new = sub(record, 1, journal_at - 1) .. journal
  else
    local reserved_at = sub(attempt, 21, 28)
    new = timed(key, record, sub(record, 1, 7) .. '\4' .. sub(record, 9, 32) .. reserved_at .. reserved_at
      .. sub(record, 49, journal_at - 1) .. journal)
  end
  call('SET', key, new, 'PX', expiry)
  return '1', new
end
-- Most calls name one key, and need no lists.
if #KEYS == 1 then return (append(KEYS[1], call('GET', KEYS[1]), ARGV[1], ARGV[2], ARGV[3])) end
-- Two requests of one call may name the same key: the second one gets the record that the first one has written.
local found, written, answers, errors = call('MGET', unpack(KEYS)), {}, {}, {}
for i = 1, #KEYS do
  local key, at = KEYS[i], 3 * i
  -- An error is caught, so that the other keys still get an answer.
  local done, answer, record = pcall(append, key, written[key] or found[i], ARGV[at - 2], ARGV[at - 1], ARGV[at])
  if done then
    written[key] = record
  else
    -- A server that became a replica refuses every write, and this error makes the store connect anew.
    if type(answer) == 'table' and sub(answer.err, 1, 8) == 'READONLY' then return answer end
    -- Any error that no command has returned comes from bytes that can't be read.
    errors[#errors + 1] = type(answer) == 'table' and answer.err or 'DAMAGED the record is cut off'
    answer = 'E'
  end
  answers[i] = answer
end
return { table.concat(answers), unpack(errors) }
