package journal

import (
	"maps"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// lists has the journal's claims in memory: by UID, by GPU and by pod. A list is ordered by UID
// and never modified; a change of a claim replaces the lists that it is in. The list of all claims
// is built when Claims needs it, so a prepare takes the same time however many claims the node
// has.
type lists struct {
	byUID map[string]holding.Claim
	byGPU map[gpu.UUID]holding.Claims
	byPod map[holding.Pod]holding.Claims
	// all is nil if it is to be made.
	all holding.Claims
}

func newLists() lists {
	return lists{byUID: map[string]holding.Claim{}, byGPU: map[gpu.UUID]holding.Claims{}, byPod: map[holding.Pod]holding.Claims{}}
}

// anyGPU is the key of claims that may have every GPU.
const anyGPU = gpu.UUID("")

// gpusOf returns the keys of the claim's GPUs.
func gpusOf(c holding.Claim) []gpu.UUID {
	if c.IsUnreadable() && len(c.Holdings) == 0 {
		return []gpu.UUID{anyGPU}
	}
	return c.GPUs()
}

// Claims returns all claims that have a record, readable or not, or may have one after a failed
// write, ordered by UID. A claim is listed as Doubtful while a record is put in its place, with the
// record before it if there is one. Callers must not modify the results of Claims, ClaimsOn and
// ClaimsOf.
func (j *Journal) Claims() holding.Claims {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.lists.all == nil {
		j.lists.all = make(holding.Claims, 0, len(j.lists.byUID))
		for _, uid := range slices.Sorted(maps.Keys(j.lists.byUID)) {
			j.lists.all = append(j.lists.all, j.lists.byUID[uid])
		}
	}
	return j.lists.all
}

// ClaimsOn returns the claims that have, or may have, something of the GPU; with admin access, too.
func (j *Journal) ClaimsOn(uuid gpu.UUID) holding.Claims {
	j.mu.Lock()
	defer j.mu.Unlock()
	on := j.lists.byGPU[uuid]
	for _, c := range j.lists.byGPU[anyGPU] {
		on = with(on, c)
	}
	return on
}

// ClaimsOf returns those of Claims that were prepared for the pod.
func (j *Journal) ClaimsOf(pod holding.Pod) holding.Claims {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.lists.byPod[pod]
}

// Claim returns the claim that Claims has; false if it has none of that UID.
func (j *Journal) Claim(uid string) (holding.Claim, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c, ok := j.lists.byUID[uid]; ok {
		return c, true
	}
	return holding.Claim{Record: holding.Record{ClaimUID: uid}}, false
}

// note brings the lists up to date with a claim's record and phase. It needs the lock.
func (j *Journal) note(uid string) {
	j.lists.remove(uid)
	if c, ok := j.read(uid); ok {
		j.lists.add(c)
	}
}

func (l *lists) add(c holding.Claim) {
	l.byUID[c.ClaimUID], l.all = c, nil
	for _, uuid := range gpusOf(c) {
		l.byGPU[uuid] = with(l.byGPU[uuid], c)
	}
	for _, pod := range c.Pods {
		l.byPod[pod] = with(l.byPod[pod], c)
	}
}

func (l *lists) remove(uid string) {
	c, ok := l.byUID[uid]
	if !ok {
		return
	}
	delete(l.byUID, uid)
	l.all = nil
	for _, uuid := range gpusOf(c) {
		removeFrom(l.byGPU, uuid, uid)
	}
	for _, pod := range c.Pods {
		removeFrom(l.byPod, pod, uid)
	}
}

func removeFrom[K comparable](by map[K]holding.Claims, key K, uid string) {
	if by[key] = without(by[key], uid); len(by[key]) == 0 {
		delete(by, key)
	}
}

// find returns where in the list the claim is, or would be.
func find(list holding.Claims, uid string) (int, bool) {
	return slices.BinarySearchFunc(list, uid, func(c holding.Claim, uid string) int { return strings.Compare(c.ClaimUID, uid) })
}

// with returns a copy of the list with the claim added. The list must not have it yet.
func with(list holding.Claims, c holding.Claim) holding.Claims {
	n, _ := find(list, c.ClaimUID)
	return slices.Concat(list[:n], holding.Claims{c}, list[n:])
}

// without returns a copy of the list without the claim, or the list if it doesn't have it.
func without(list holding.Claims, uid string) holding.Claims {
	n, ok := find(list, uid)
	if !ok {
		return list
	}
	return slices.Concat(list[:n], list[n+1:])
}

// read returns what the files say of a claim, and its phase.
func (j *Journal) read(uid string) (holding.Claim, bool) {
	s := j.claims
	s.mu.RLock()
	defer s.mu.RUnlock()
	record, recorded := s.records[uid]
	written, doubtful := s.doubtful[uid]
	f, unreadable := s.unreadable[uid]
	c := holding.Claim{Record: record}
	switch {
	case doubtful && !recorded:
		c.Record, c.State = written, holding.Doubtful
	case doubtful:
		c.State = holding.Doubtful
	case recorded:
	case unreadable:
		c = unreadableClaim(uid, f)
	default:
		return holding.Claim{}, false
	}
	c.Phase = j.phases[uid]
	return c, true
}

// unreadableClaim returns what is left of a claim's record.
func unreadableClaim(uid string, f file[holding.Record]) holding.Claim {
	return holding.Claim{Record: salvage(uid, f.data), State: holding.Unreadable, File: f.path, Err: f.err}
}

// unreadableClaims returns them in the order of their UIDs.
func unreadableClaims(files map[string]file[holding.Record]) holding.Claims {
	claims := make(holding.Claims, 0, len(files))
	for _, uid := range slices.Sorted(maps.Keys(files)) {
		claims = append(claims, unreadableClaim(uid, files[uid]))
	}
	return claims
}

// Put writes the claim's record, in place of any it has. When it returns nil the record is
// on disk. On an error the record before it, or none, still holds, except where the error
// comes from the last steps: then the claim is doubtful, and another Put or a Delete
// settles it. The claim's phase stays.
func (j *Journal) Put(r holding.Record) error {
	r.Holdings, r.Pods, r.RefusedClaims = slices.Clone(r.Holdings), slices.Clone(r.Pods), slices.Clone(r.RefusedClaims)
	temp, err := j.claims.stage(r)
	if err == nil {
		j.mu.Lock()
		j.note(r.ClaimUID) // others that leave the devices now may find it on disk after a crash
		j.mu.Unlock()
		err = j.claims.commit(r, temp)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.note(r.ClaimUID)
	return j.claims.notWritten(r, err)
}

// Delete removes the claim's record and its renamed file, and then its phase. When it
// returns nil the removal is on disk; nil also when there is no record.
func (j *Journal) Delete(uid string) error {
	err := j.claims.remove(uid)
	j.mu.Lock()
	defer j.mu.Unlock()
	if err == nil {
		delete(j.phases, uid)
	}
	j.note(uid)
	return err
}

// AdvancePhase says that the claim's unprepare has come as far as this phase, or farther.
func (j *Journal) AdvancePhase(uid string, to holding.Phase) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if to > j.phases[uid] {
		j.phases[uid] = to
		j.note(uid)
	}
}

// ResetPhase says that the claim is prepared again.
func (j *Journal) ResetPhase(uid string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.phases[uid] != holding.Prepared {
		delete(j.phases, uid)
		j.note(uid)
	}
}
