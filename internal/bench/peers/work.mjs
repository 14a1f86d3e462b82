// What the scripts beside this one have in common: they do turns of work as they are told, a line "work n" each, and
// answer with a line of JSON that says how long it took. They end when their standard input does.
import { createInterface } from 'node:readline';

/** serve does turns until the input ends. Each work is an async function of n that may return further figures. */
export async function serve(works) {
    process.stdout.write('ready\n');
    for await (const line of createInterface({ input: process.stdin })) {
        const [name, n] = line.split(' ');
        const before = process.cpuUsage();
        const begin = process.hrtime.bigint();
        const extra = await works[name](Number(n));
        const took = Number(process.hrtime.bigint() - begin);
        const { user, system } = process.cpuUsage(before);
        const cpu = { 'cpu-ns/op': ((user + system) * 1000) / n };
        process.stdout.write(`${JSON.stringify({ N: Number(n), NS: took, Extra: { ...cpu, ...extra } })}\n`);
    }
    process.exit(0);
}
