-- One report, or one batch of submissions: every change in one atomic step, fenced by the leader's epoch.
-- KEYS: epoch, one sorted set per queue level, then per change its hash and its log.
-- ARGV: epoch, seconds that an ended request is kept, number of levels, then per change:
--   id, create (1/0), start (-1: no tokens), new tokens, log, level, score, ended (1/0),
--   number of fields, then name and value of each.
-- Returns a verdict per change: 1 applied (or applied before), 0 stale, 2 exists.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return redis.error_reply('FENCED another leader has taken over')
end
local ttl, levels = ARGV[2], tonumber(ARGV[3])
local key, arg, verdicts = 1 + levels, 3, {}
while arg < #ARGV do
  local hash, log = KEYS[key + 1], KEYS[key + 2]
  local id, create, start, new = ARGV[arg + 1], ARGV[arg + 2] == '1', tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
  local bytes, level, score = ARGV[arg + 5], ARGV[arg + 6], ARGV[arg + 7]
  local ended, count = ARGV[arg + 8] == '1', tonumber(ARGV[arg + 9])
  local fields = {'level', level}
  for i = arg + 10, arg + 9 + 2 * count do fields[#fields + 1] = ARGV[i] end
  key, arg = key + 2, arg + 9 + 2 * count

  local stored = redis.call('HMGET', hash, 'emitted', 'level', 'submit', 'arrival', 'ending')
  local emitted, was, over, verdict = tonumber(stored[1] or '-1'), stored[2], stored[5], 1
  if create and stored[3] then
    -- The same submission once more is no conflict; another one under the same id is.
    for i = 1, #fields, 2 do
      if fields[i] == 'submit' and fields[i + 1] ~= stored[3] then verdict = 2 end
      if fields[i] == 'arrival' and fields[i + 1] ~= stored[4] then verdict = 2 end
    end
  elseif create then
    emitted = 0
    redis.call('HSET', hash, 'emitted', 0)
  elseif emitted < 0 then
    verdict = 0
  end
  -- A commit may be repeated whole, and hold several rounds of one request: what the output covers was written before.
  local appends = start == emitted and not over
  if not appends and start + new > emitted then verdict = 0 end
  if verdict == 1 and appends then
    redis.call('APPEND', log, bytes)
    redis.call('HSET', hash, 'emitted', start + new)
  end
  local newest = start < 0 or start + new >= emitted
  if verdict == 1 and newest and not over then
    redis.call('HSET', hash, unpack(fields))
    if was and was ~= level then redis.call('ZREM', KEYS[1 + tonumber(was)], id) end
    if ended then
      redis.call('ZREM', KEYS[1 + tonumber(level)], id)
      redis.call('EXPIRE', hash, ttl)
      redis.call('EXPIRE', log, ttl)
    else
      redis.call('ZADD', KEYS[1 + tonumber(level)], score, id)
    end
  end
  verdicts[#verdicts + 1] = verdict
end
return verdicts
