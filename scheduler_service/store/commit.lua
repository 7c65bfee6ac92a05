-- One commit of a leader: all of its changes in one atomic step, or none.
-- KEYS: leader, the set of requests with KV, one sorted set per queue level, then per change its hash and its log.
-- ARGV: epoch, number of the commit, 1 to replace whatever is stored of these requests, seconds that an ended request
--   is kept, number of levels, then per change:
--   id, arrival, create (1/0), output tokens before, output tokens after, log, level, score, with KV (1/0), ended (1/0),
--   number of fields, then name and value of each.
-- Returns a verdict per change: 1 applied (or applied before), 2 not: the id is another request's, or it has ended.
-- Errors, and then nothing was written: FENCED, another leader took over; LOST, what was acknowledged is not there.
local mine, number, whole = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
local leader = redis.call('HMGET', KEYS[1], 'epoch', 'commit')
local epoch, last = tonumber(leader[1] or '0'), tonumber(leader[2] or '0')
if epoch > mine then return redis.error_reply('FENCED another leader has taken over') end
local again = epoch == mine and last == number -- repeated, since its answer was lost
if not whole and not again and (epoch ~= mine or last ~= number - 1) then
  return redis.error_reply('LOST earlier commits')
end

local ttl, levels = ARGV[4], tonumber(ARGV[5])
local key, arg, changes, verdicts, lengths = 2 + levels, 5, {}, {}, {}
while arg < #ARGV do
  local change = {hash = KEYS[key + 1], log = KEYS[key + 2], at = arg, count = tonumber(ARGV[arg + 11])}
  key, arg = key + 2, arg + 11 + 2 * change.count
  local arrival, create, before = ARGV[change.at + 2], ARGV[change.at + 3] == '1', ARGV[change.at + 4]
  local stored = redis.call('HMGET', change.hash, 'arrival', 'emitted', 'ending')
  local taken = (stored[1] and stored[1] ~= arrival) or ((stored[3] or lengths[change.hash] == 'over') and not again)
  if taken and not whole then
    verdicts[#verdicts + 1] = 2
  else
    local length = lengths[change.hash] or stored[2] or (create and '0')
    if length ~= before and not (whole or again) then
      return redis.error_reply('LOST output of ' .. ARGV[change.at + 1])
    end
    lengths[change.hash] = ARGV[change.at + 10] == '1' and 'over' or ARGV[change.at + 5]
    verdicts[#verdicts + 1] = 1
    changes[#changes + 1] = change
  end
end
if again then return verdicts end

for _, change in ipairs(changes) do
  local hash, log, at = change.hash, change.log, change.at
  local id, level, was = ARGV[at + 1], ARGV[at + 7], redis.call('HGET', hash, 'level')
  if was and (whole or was ~= level) then redis.call('ZREM', KEYS[2 + tonumber(was)], id) end
  if whole then redis.call('DEL', hash, log) end
  local fields = {'emitted', ARGV[at + 5], 'level', level}
  for i = at + 12, at + 11 + 2 * change.count do fields[#fields + 1] = ARGV[i] end
  redis.call('HSET', hash, unpack(fields))
  if ARGV[at + 6] ~= '' then redis.call('APPEND', log, ARGV[at + 6]) end
  redis.call(ARGV[at + 9] == '1' and 'SADD' or 'SREM', KEYS[2], id)
  if ARGV[at + 10] == '1' then
    redis.call('ZREM', KEYS[2 + tonumber(level)], id)
    redis.call('EXPIRE', hash, ttl)
    redis.call('EXPIRE', log, ttl)
  else
    redis.call('ZADD', KEYS[2 + tonumber(level)], ARGV[at + 8], id)
  end
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'commit', ARGV[2])
return verdicts
