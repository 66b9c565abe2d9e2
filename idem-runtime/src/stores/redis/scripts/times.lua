-- The text of this file precedes each script that writes records. Bytes 33 to 48 of a record are two times, in
-- milliseconds since 1970: the first sight of its key and the begin of its attempt; zeros if unknown. A pending record
-- that was not renewed yet has no such times: its retention runs since it was reserved. No decision depends on these
-- times, so a login without the right to ask for them causes no failure.
local NEVER = '\0\0\0\0\0\0\0\0'
local UNKNOWN = NEVER .. NEVER
local function times(key, record)
  local seen, began = string.sub(record, 33, 40), string.sub(record, 41, 48)
  local lease_at = 49 + bit.band(string.byte(record, 7), 4) * 8
  if string.byte(record, 6) == 80 and began == NEVER and #record >= lease_at + 15 then
    local lease, ttl = struct.unpack('>I8I8', record, lease_at)
    local expires_at = redis.pcall('PEXPIRETIME', key)
    if type(expires_at) == 'number' and expires_at > lease + ttl then
      began = struct.pack('>I8', expires_at - lease - ttl)
      if seen == NEVER then seen = began end
    end
  end
  return seen .. began
end
-- Returns the record that replaces another one, with the times of the old record. If the old record has no times yet,
-- the new record may contain them.
local function timed(key, record, new)
  if string.sub(record, 33, 48) == UNKNOWN and string.sub(new, 41, 48) ~= NEVER then return new end
  return string.sub(new, 1, 32) .. times(key, record) .. string.sub(new, 49)
end
-- Returns the bytes that differ between two writes of a record: its state, whether its body has begun, owner token and
-- counters, and the length of the record, which each entry of the journal changes.
local function identity(record)
  return string.sub(record, 6, 6) .. string.char(bit.band(string.byte(record, 7) or 0, 16)) .. string.sub(record, 9, 32)
    .. struct.pack('>I4', #record)
end
