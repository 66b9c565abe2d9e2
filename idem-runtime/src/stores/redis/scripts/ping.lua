-- Sends each command of calls for a key that does not exist, so that nothing changes and nothing fails: a server checks
-- rights, memory and role before it looks at the key. ARGV: '', the key. Answers the errors. The script names no key,
-- because it runs on every node of a cluster.
local key, errors = ARGV[2], {}
local answers = {
  redis.pcall('SET', key, '', 'XX', 'PX', 1),
  redis.pcall('GET', key),
  redis.pcall('MGET', key),
  redis.pcall('PTTL', key),
  redis.pcall('PEXPIRE', key, 1),
  redis.pcall('GETRANGE', key, 0, 0),
  redis.pcall('SETRANGE', key, 0, '')
}
for _, answer in ipairs(answers) do
  if type(answer) == 'table' and answer.err then errors[#errors + 1] = answer.err end
end
return errors
