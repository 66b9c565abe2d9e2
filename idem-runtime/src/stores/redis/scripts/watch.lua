-- Marks a record, so that the script that ends its attempt wakes the waiters. KEYS: record. ARGV: attempt's number (4
-- bytes).
-- Answers 1 if the attempt is pending, 0 if there is nothing to wait for.
local record = redis.call('GETRANGE', KEYS[1], 0, 31)
if string.sub(record, 1, 6) ~= 'idem\1P' then return 0 end
if string.sub(record, 25, 28) ~= ARGV[1] then return 0 end
local flags = string.byte(record, 7)
-- Keeps the retention, and so the age of the lease.
if flags % 2 == 0 then redis.call('SETRANGE', KEYS[1], 6, string.char(flags + 1)) end
return 1
