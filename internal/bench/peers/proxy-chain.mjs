// A proxy-chain server that passes each request to the next of the proxies given as arguments. It says its port first.
import { Server } from 'proxy-chain';

const upstreams = process.argv.slice(2).map((address) => `http://${address}`);
let next = 0;

const server = new Server({
    host: '127.0.0.1',
    port: 0,
    prepareRequestFunction: () => ({ upstreamProxyUrl: upstreams[next++ % upstreams.length] }),
});
await server.listen();
process.stdout.write(`${server.port}\n`);
process.stdin.resume();
process.stdin.on('end', () => process.exit(0));
