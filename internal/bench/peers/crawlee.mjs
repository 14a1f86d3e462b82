// Crawlee's own way to a proxy for a request: a session of the pool, and the proxy that belongs to it.
import { Configuration, ProxyConfiguration, SessionPool } from '@crawlee/core';
import { setTimeout as sleep } from 'node:timers/promises';
import { serve } from './work.mjs';

const proxies = 10;

const config = new Configuration({ persistStorage: false });
const configuration = new ProxyConfiguration({
    proxyUrls: Array.from({ length: proxies }, (_, i) => `http://192.0.2.${i + 1}:3128`),
});
// Sessions that wear out would be made anew now and then, which costs Crawlee time.
const pool = await SessionPool.open({
    maxPoolSize: proxies,
    sessionOptions: { maxUsageCount: 1e12, maxAgeSecs: 1e6 },
    persistenceOptions: { enable: false },
}, config);

async function lease(n) {
    for (let i = 0; i < n; i++) {
        const session = await pool.getSession();
        await configuration.newProxyInfo(session.id);
        session.markGood();
    }
}

// overlap has 30 workers hold a proxy for a millisecond each time, n times in all, and counts how often one was given
// out that somebody held.
async function overlap(n) {
    const holders = new Map();
    let left = n;
    let most = 0;
    let beyond = 0;
    await Promise.all(Array.from({ length: 30 }, async () => {
        while (left-- > 0) {
            const session = await pool.getSession();
            const { url } = await configuration.newProxyInfo(session.id);
            const now = (holders.get(url) ?? 0) + 1;
            holders.set(url, now);
            most = Math.max(most, now);
            if (now > 1) beyond++;
            await sleep(1);
            holders.set(url, holders.get(url) - 1);
            session.markGood();
        }
    }));
    return { 'overlaps/hold': beyond / n, holders: most };
}

await serve({ lease, overlap });
