-- One report, or one batch of submissions: every change in one atomic step, fenced by the leader's epoch.
-- KEYS: epoch, fleet, one sorted set per queue level, then per change its hash and its log.
-- ARGV: epoch, seconds that an ended request is kept, number of levels, then per change:
--   id, create (1/0), start (-1: no tokens), new tokens, log, level, score, ended (1/0), finished tokens (-1: none),
--   number of fields, then name and value of each.
-- Returns a verdict per change: 1 applied (or applied before), 0 stale, 2 exists.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return redis.error_reply('FENCED another leader has taken over')
end
local ttl, levels = ARGV[2], tonumber(ARGV[3])
local key, arg, verdicts = 2 + levels, 3, {}
while arg < #ARGV do
  local hash, log = KEYS[key + 1], KEYS[key + 2]
  local id, create, start, new = ARGV[arg + 1], ARGV[arg + 2] == '1', tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
  local bytes, level, score = ARGV[arg + 5], ARGV[arg + 6], ARGV[arg + 7]
  local ended, finished, count = ARGV[arg + 8] == '1', tonumber(ARGV[arg + 9]), tonumber(ARGV[arg + 10])
  local fields = {'level', level}
  for i = arg + 11, arg + 10 + 2 * count do fields[#fields + 1] = ARGV[i] end
  key, arg = key + 2, arg + 10 + 2 * count

  local stored = redis.call('HMGET', hash, 'emitted', 'level', 'submit', 'ending')
  local emitted, verdict = stored[1] and tonumber(stored[1]), 1
  if create then
    if stored[3] then
      -- The same submission once more is no conflict; another one under the same id is.
      for i = 1, #fields, 2 do
        if fields[i] == 'submit' and fields[i + 1] ~= stored[3] then verdict = 2 end
      end
      if stored[4] or emitted > 0 then verdict = 2 end
    else
      emitted = 0
      redis.call('HSET', hash, 'emitted', 0)
    end
  elseif not emitted or stored[4] then
    verdict = 0
    if stored[4] and ended and start < 0 then verdict = 1 end
    if stored[4] and start >= 0 and emitted == start + new then verdict = 1 end
  end
  local write = verdict == 1 and not stored[4]
  if write and start >= 0 then
    if emitted == start then
      redis.call('APPEND', log, bytes)
      redis.call('HSET', hash, 'emitted', start + new)
    elseif emitted ~= start + new then
      write, verdict = false, 0
    end
  end
  if write then
    redis.call('HSET', hash, unpack(fields))
    if stored[2] and stored[2] ~= level then redis.call('ZREM', KEYS[2 + tonumber(stored[2])], id) end
    if ended then
      redis.call('ZREM', KEYS[2 + tonumber(level)], id)
      redis.call('EXPIRE', hash, ttl)
      redis.call('EXPIRE', log, ttl)
      if finished >= 0 then
        redis.call('HINCRBY', KEYS[2], 'finished', 1)
        redis.call('HINCRBY', KEYS[2], 'tokens', finished)
      end
    else
      redis.call('ZADD', KEYS[2 + tonumber(level)], score, id)
    end
  end
  verdicts[#verdicts + 1] = verdict
end
return verdicts
