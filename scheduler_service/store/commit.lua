-- One commit of a leader: all of its changes in one atomic step, or none.
-- KEYS: leader, the set of requests with KV, one sorted set per queue level.
-- ARGV: epoch; number of the commit; for Store.rewrite the number that it follows, else ''; seconds that an ended request
--   is kept; number of levels; the prefixes of the keys of a request's hash and log (its id follows, and they share the
--   slot of the KEYS); the changes, in MessagePack (as a thousand arguments they would cost the client more than all of
--   its scheduling). A change is {id, arrival, create, output tokens before, after, log, level, score, with KV, ended,
--   fields}. Without fields nothing has changed except the output. For Store.rewrite also: epoch and commit ('' if the
--   leader had stepped down) that were there when this leader took over.
-- Returns a verdict for each change: 1, it is written (perhaps by an earlier attempt); 2, it is not: the id is another
--   request's, or the request has ended.
-- Errors, and then nothing was written: FENCED, another leader took over; LOST, what was acknowledged is not there.
local mine, number, follows = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local whole = follows ~= nil
local leader = redis.call('HMGET', KEYS[1], 'epoch', 'commit')
local epoch, last = tonumber(leader[1] or '0'), tonumber(leader[2] or '-1') -- no commit: it has stepped down
if epoch > mine then return redis.error_reply('FENCED another leader has taken over') end
local again = not whole and epoch == mine and last == number -- repeated, since its answer was lost
local in_order = epoch == mine and last == (follows or number - 1)
if whole and follows >= 0 and (epoch ~= mine or last <= follows) then
  -- The first part of a rewriting. What is stored does not count, unless another leader wrote more than this one read.
  local read_epoch, read = tonumber(ARGV[9]), tonumber(ARGV[10]) or math.huge
  local holds = tonumber(leader[2]) or math.huge
  if epoch ~= mine and read_epoch and (epoch > read_epoch or (epoch == read_epoch and holds > read)) then
    return redis.error_reply('FENCED this server holds writes that the leader has not read')
  end
  in_order = true
end
if not (again or in_order) then return redis.error_reply('LOST earlier commits') end

local ttl, levels = ARGV[4], tonumber(ARGV[5])
local changes, verdicts, lengths, arrivals = {}, {}, {}, {}
for i, change in ipairs(cmsgpack.unpack(ARGV[8])) do
  local id, arrival, create, before, after, output, level, score, with_kv, ended, fields = unpack(change)
  local hash, log = ARGV[6] .. id, ARGV[7] .. id
  local stored = redis.call('HMGET', hash, 'arrival', 'emitted', 'ending')
  local known = arrivals[hash] or tonumber(stored[1]) -- it tells requests of the same id apart
  -- A record without its arrival was set aside, or has lost it: no request may mix with it.
  local unreadable = not known and (stored[3] or (create and stored[2]))
  local taken = unreadable or (known and known ~= arrival) or ((stored[3] or lengths[hash] == 'over') and not again)
  if taken and not whole then
    verdicts[i] = 2
  else
    local length = lengths[hash] or tonumber(stored[2]) or (create and 0)
    if length ~= before and not (whole or again) then
      return redis.error_reply('LOST output of ' .. id)
    end
    lengths[hash] = ended and 'over' or after
    arrivals[hash] = arrival
    verdicts[i] = 1
    changes[#changes + 1] = {hash, log, id, after, output, level, score, with_kv, ended, fields}
  end
end
if again then return verdicts end

for _, change in ipairs(changes) do
  local hash, log, id, after, output, level, score, with_kv, ended, fields = unpack(change)
  local brief = #fields == 0
  local was = not brief and tonumber(redis.call('HGET', hash, 'level'))
  if whole then redis.call('DEL', hash, log) end
  -- HSET comes first: while memory is full Redis refuses it, unless the script has written before.
  redis.call('HSET', hash, 'emitted', after, 'level', level, unpack(fields))
  if was and was ~= level then redis.call('ZREM', KEYS[2 + was], id) end
  if whole or not (was or brief) then -- its hash may have been evicted while a queue still names it
    for queue = 1, levels do redis.call('ZREM', KEYS[2 + queue], id) end
  end
  if output ~= '' then redis.call('APPEND', log, output) end
  if not brief then redis.call(with_kv and 'SADD' or 'SREM', KEYS[2], id) end
  if ended then
    redis.call('ZREM', KEYS[2 + level], id)
    redis.call('EXPIRE', hash, ttl)
    redis.call('EXPIRE', log, ttl)
  elseif not brief then
    redis.call('ZADD', KEYS[2 + level], score, id)
  end
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'commit', ARGV[2])
return verdicts
