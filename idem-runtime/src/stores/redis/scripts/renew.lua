-- Renews leases. KEYS: records. ARGV: for each key its owner token with the attempt's number, and its retention. The
-- first renewal notes when the attempt began; until then, that time follows from the retention. Answers one character
-- per key: 1 done, 0 refused, D damaged.
local KEYS, ARGV, sub = KEYS, ARGV, string.sub
local found, answers = redis.call('MGET', unpack(KEYS)), {}
for i = 1, #KEYS do
  local record, answer = found[i], '0'
  if record and sub(record, 9, 28) == ARGV[2 * i - 1] and sub(record, 1, 6) == 'idem\1P' then
    if sub(record, 41, 48) == NEVER then redis.pcall('SETRANGE', KEYS[i], 32, times(KEYS[i], record)) end
    -- Only a record that has an expiry gets a new one.
    answer = redis.call('PEXPIRE', KEYS[i], ARGV[2 * i], 'XX') == 1 and '1' or 'D'
  end
  answers[i] = answer
end
return table.concat(answers)
