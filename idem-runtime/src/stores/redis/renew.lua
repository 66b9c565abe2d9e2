-- Renews leases. KEYS: records. ARGV: for each its owner token and its retention.
-- Answers one character a key: 1 done, 0 refused.
local records, answers = redis.call('MGET', unpack(KEYS)), {}
for i = 1, #KEYS do
  local record, own = records[i], '0'
  if record and string.sub(record, 9, 24) == ARGV[2 * i - 1] and string.sub(record, 1, 6) == 'idem\1P' then
    redis.call('PEXPIRE', KEYS[i], ARGV[2 * i])
    own = '1'
  end
  answers[i] = own
end
return table.concat(answers)
