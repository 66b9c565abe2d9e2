-- Finishes many records. KEYS: records. ARGV: wake channel, then for each key its new record and retention. A record is
-- replaced only by its own attempt: owner token and number, side by side in both records, must be equal. A record that
-- has lost its expiry gets an expiry again: no other attempt can have taken over such a record. Answers one character
-- per key: 1 done, 0 refused, E not written, because of the error in the second element.
local KEYS, ARGV, pcall, sub, byte = KEYS, ARGV, redis.pcall, string.sub, string.byte
-- An error of `MGET` is not caught: it becomes the answer for all keys, so that no record is refused unread.
local found, answers, failure = redis.call('MGET', unpack(KEYS)), {}, nil
for i = 1, #KEYS do
  local record, at, answer = found[i], 2 * i, '0'
  if record and sub(record, 9, 28) == sub(ARGV[at], 9, 28) and sub(record, 1, 5) == 'idem\1' then
    local state, flags = byte(record, 6, 7)
    if state == 80 then
      -- An error of `SET` is caught, so that the other keys still get an answer.
      local reply = pcall('SET', KEYS[i], timed(KEYS[i], record, ARGV[at]), 'PX', ARGV[at + 1])
      if reply.err then
        answer, failure = 'E', failure or reply.err
      else
        answer = '1'
        if flags % 2 == 1 then pcall('PUBLISH', ARGV[1], KEYS[i]) end
      end
    elseif state == 67 or state == 70 then
      answer = '1'
    end
  end
  answers[i] = answer
end
if failure then return { table.concat(answers), failure } end
return table.concat(answers)
